"""`verify=True`: the engines' own checksums, compared after a send and before the label; whoever lies is dirty."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ckptsync.errors import EngineDirty, ProofFailed
from ckptsync.sync import WeightSync
from ckptsync.transports import Checkpoint
from ckptsync.transports.chain import Patience
from ckptsync.transports.sums import Verification
from ckptsync.transports.vllm_receiver import OF_NOTHING
from tests.transports.receivers import FileDevices
from tests.transports.sends import Small, same, send, weights
from tests.transports.ways import WAYS, a_server, an_engine, transports

COLOCATED = ("vllm_ipc", "sglang_tensor")
SUMS = {"vllm": "POST /weight_checker", "sglang": "POST /weights_checker"}


ALONE = "no engine like it to compare with"


class Replicas:
    """Servers of one kind, and a trainer that verifies; `spare` comes after it, or files."""

    def __init__(self, way: str, folder: Any, count: int = 1, *, files: bool = False) -> None:
        self.update, self.sums = WAYS[way][1].bucket, SUMS[way.partition("_")[0]]
        self.servers = [a_server(way, ["GPU-0"]) for _ in range(count)]
        self.engines = [
            an_engine(way, f"http://127.0.0.1:{at}", transport=server.transport)
            for at, server in enumerate(self.servers, 1)
        ]
        self.names = [engine.name for engine in self.engines]
        devices = FileDevices(str(folder), "GPU-0")
        gpus = {engine.name: ["GPU-0"] for engine in self.engines}
        self.fast, self.spare = transports(way, self.servers[0].group, devices, gpus, verify=True)
        after = Checkpoint() if files else self.spare
        options: dict[str, Any] = {"patience": Patience(tries=1), "bucket_bytes": 600}
        self.sync = WeightSync([self.fast, after], channel=f"{folder}/root", engines=self.engines, **options)

    def drops(self, at: int, *, keep: int = 0) -> None:
        """From now on that server answers 200 to updates without a look at them, but for the first `keep`."""
        server, seen = self.servers[at], []

        def answer() -> Any:
            seen.append(json.loads(server.requests[-1].content))
            if len(seen) <= keep:
                return server.answer(self.update, seen[-1])
            if self.fast.name not in COLOCATED:
                server.group.received(seen[-1].get("update_info", seen[-1]))
            return 200, {"success": True, "message": "Success"}

        server.answers[self.update] = answer

    def mend(self, at: int) -> list[Any]:
        self.servers[at].answers.clear()
        return []

    def verdict(self, at: int = 0) -> Any:
        return self.fast.verification.verdicts[self.names[at]]

    def hold(self, model: Any, label: str) -> bool:
        return all(
            (server.label, server.paused) == (label, False) and same(server.weights, weights(model))
            for server in self.servers
        )


@pytest.mark.parametrize("way", COLOCATED)
def test_replicas_are_labelled_once_their_sums_are_found_equal(way, tmp_path):
    made = Replicas(way, tmp_path, 2)
    labels, server = [], made.servers[0]

    def summed() -> Any:
        labels.append(server.label)
        return server.answer(made.sums, json.loads(server.requests[-1].content))

    server.answers[made.sums] = summed
    with made.sync as sync:
        assert sync.sync(Small(1)).transport == way
        assert made.verdict(1) == (True, "has the sums of 1 more; nothing was sent before", False)
        assert sync.sync(Small(2)).failures == ()
        assert made.verdict(1) == (True, "has the sums of 1 more; changed with the weights", False)
        assert sync.sync(Small(2)).failures == ()
        assert made.verdict(0).says.endswith("unchanged since the last send")
    assert labels[-3:] == ["partial e1-v1", "partial e1-v2", "partial e1-v3"]
    assert made.hold(Small(2), "e1-v3")


@pytest.mark.parametrize("way", COLOCATED)
def test_of_three_replicas_the_one_that_took_a_part_is_dirty_and_the_others_serve(way, tmp_path):
    made = Replicas(way, tmp_path, 3)
    with made.sync as sync:
        sync.sync(Small(1))
        made.drops(1, keep=1)
        made.spare.look = lambda: [(server.label, server.paused) for server in made.servers] + made.mend(1)
        done = sync.sync(Small(2))
    (failure,) = done.failures
    assert failure.phase == "finish"
    assert f"{made.names[1]}: differs from {made.names[0]} in" in failure.message
    assert "tp0:layers.0" in failure.message
    assert made.spare.found == [("e1-v2", False), ("partial e1-v2", True), ("e1-v2", False)]
    assert (done.transport, done.dirty) == ("spare", ())
    assert made.hold(Small(2), "e1-v2")
    assert [len(server.updates) for server in made.servers] == [6, 7, 6], "it alone was sent to again"


@pytest.mark.parametrize("way", COLOCATED)
def test_of_two_replicas_that_differ_both_are_left_to_files(way, tmp_path):
    made = Replicas(way, tmp_path, 2, files=True)
    with made.sync as sync:
        sync.sync(Small(1))
        made.drops(1)
        done = sync.sync(Small(2))
    assert (done.transport, set(done.dirty)) == ("checkpoint", set(made.names))
    assert set(done.failures[0].touched) == set(made.names)
    assert [(server.label, server.paused) for server in made.servers] == [("partial e1-v2", True)] * 2


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_alone_that_says_200_and_takes_nothing_is_found_at_the_next_weights(way, tmp_path, caplog):
    made = Replicas(way, tmp_path, files=True)
    with made.sync as sync:
        sync.sync(Small(1))
        assert made.verdict().holds
        assert made.verdict().says == f"{ALONE}; nothing was sent before"
        assert [record.event for record in caplog.records] == ["sums-compared"], "a warning that says so"
        sync.sync(Small(2))
        assert made.verdict() == (True, f"{ALONE}; changed with the weights", False)
        made.drops(0)
        done = sync.sync(Small(3))
    assert (done.transport, done.dirty, made.servers[0].paused) == ("checkpoint", (made.names[0],), True)
    assert "has the sums of the weights before, though others were sent" in done.failures[0].message
    assert made.servers[0].label == "partial e1-v3"


def test_a_label_that_was_answered_well_and_not_set_after_good_sums_leaves_the_engine_dirty(tmp_path):
    made = Replicas("vllm_ipc", tmp_path, files=True)
    made.servers[0].answers["POST /update_weight_version"] = (200, {"success": True})
    with made.sync as sync:
        done = sync.sync(Small(1))
    assert (done.failures[0].phase, done.dirty, made.servers[0].paused) == ("confirm", (made.names[0],), True)


@pytest.mark.parametrize("way", COLOCATED)
def test_an_engine_without_the_route_is_refused_at_the_probe_untouched(way, tmp_path):
    made = Replicas(way, tmp_path, files=True)
    made.servers[0].answers[made.sums] = (404, {"detail": "Not Found"})
    with made.sync as sync:
        done = sync.sync(Small(1))
    assert (done.transport, done.failures[0].phase, made.servers[0].updates) == ("checkpoint", "probe", [])
    assert "takes no checksums" in done.failures[0].message


@pytest.mark.parametrize("way", COLOCATED)
@pytest.mark.parametrize(
    "answer",
    [
        (500, "no"),
        (200, {"success": True, "checksums": {}, "ranks": []}),
        (200, {"success": True}),
        httpx.ReadTimeout("late"),
    ],
    ids=["an error", "of nothing", "none", "late"],
)
def test_an_engine_that_gives_no_sums_when_asked_gets_no_label(way, answer, tmp_path):
    made = Replicas(way, tmp_path)
    made.servers[0].answers[made.sums] = answer
    with made.sync, pytest.raises((EngineDirty, ProofFailed), match="sums: POST"):
        send(made.fast, Small(1), made.engines)
    assert made.servers[0].label == "partial e1-v7"
    assert made.fast.last.touched == set(made.names)


def test_tensors_of_which_vllm_sums_nothing_are_named_and_their_change_is_not_demanded(tmp_path, caplog):
    made = Replicas("vllm_ipc", tmp_path)
    made.servers[0].sums = lambda: {"embed": "1" * 64, "packed": OF_NOTHING}
    with made.sync as sync:
        for seed in (1, 2):
            assert sync.sync(Small(seed)).failures == ()
            assert made.verdict().gap
            assert made.verdict().says.endswith("no sum of 1 of 2 tensors")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


X, Y = {"tp0:w": "1", "tp1:w": "2"}, {"tp0:w": "1", "tp1:w": "3"}
OTHER_SHAPE = {"tp0:w": "9"}


@pytest.mark.parametrize(
    ("said", "doubted"),
    [
        ({"a": X, "b": X}, ""),
        ({"a": X, "b": Y}, "ab"),
        ({"a": X, "b": Y, "c": X}, "b"),
        ({"a": X, "b": Y, "c": X, "d": Y}, "abcd"),
        ({"a": X, "b": OTHER_SHAPE}, ""),
        ({"a": X, "b": Y, "c": OTHER_SHAPE}, "ab"),
    ],
)
def test_the_majority_of_those_with_the_same_tensors_on_the_same_ranks_is_believed(said, doubted):
    found = Verification().judge("weights", said)
    assert found.keys() == said.keys()
    assert "".join(sorted(name for name, verdict in found.items() if not verdict.holds)) == doubted


def test_the_same_weights_give_the_same_sums_and_a_majority_that_did_not_take_others_is_not_believed():
    seen = Verification()
    assert seen.judge("one", {"a": X, "b": X})["a"].holds
    assert not seen.judge("one", {"a": Y, "b": Y})["b"].holds
    assert not seen.judge("two", {"a": X, "b": X, "c": Y})["a"].holds
    assert seen.judge("two", {"a": Y, "b": Y})["a"].holds
