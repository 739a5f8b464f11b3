"""A chain of transports with a fault at each phase: who is dirty, who takes over, what is served in the end."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.errors import EngineUnavailable, InvalidInput, NoTransport, SchemaMismatch
from ckptsync.transports import Checkpoint, engines
from tests.trainer.ranks_harness import returned, run_ranks

from .fakes import Box, Carrier, mismatch
from .jobs import a_rank_dies, a_rank_fails, a_sync, each_fault, holds, model_of, nothing_left, transient

on_two = pytest.param(2, marks=[pytest.mark.distributed, pytest.mark.slow])


@pytest.fixture(scope="module", params=[1, on_two])
def each_told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What every rank told of every fault, with a second transport behind."""
    return run(request.param, each_fault, str(tmp_path_factory.mktemp("each")))


def run(ranks: int, job: Any, root: str) -> list[Any]:
    return [job(0, 1, root)] if ranks == 1 else returned(run_ranks(ranks, job, ranks, root))


def but_boxes(told: Any) -> Any:
    return {fault: {k: v for k, v in each.items() if k not in ("boxes", "left")} for fault, each in told.items()}


TOUCHED = {"first bucket": ("a", "b"), "mid": ("a", "b"), "finish": ("a", "b"), "label": ("a", "b")}
PHASE = {"probe": "probe", "start": "start", "first bucket": "bucket", "mid": "bucket", "finish": "finish",
         "label": "confirm"}  # fmt: skip


def test_a_fault_at_each_phase_is_followed_by_the_next_transport_and_every_rank_says_the_same(
    each_told: list[Any],
) -> None:
    told = each_told
    assert all(but_boxes(other) == but_boxes(told[0]) for other in told)
    for fault, phase in PHASE.items():
        found = told[0][fault]
        assert found["result"] == ("e1-v1", "spare", ("a", "b"), (), "e1-v1"), fault
        assert found["failures"] == [("fast", phase, TOUCHED.get(fault, ()))], fault
        # What the first one finished is whole: its label came after its data.
        assert found["resent to"] == [["b"] if fault in ("finish", "label") else ["a", "b"]], fault
        assert found["boxes"] == [(True, "e1-v1", False)] * 2, fault


@pytest.mark.parametrize("ranks", [1, on_two])
def test_with_nothing_left_every_rank_raises_the_same_and_what_may_hold_a_mix_stays_paused(
    ranks: int, tmp_path: Any
) -> None:
    told = run(ranks, nothing_left, str(tmp_path))
    assert all(but_boxes(other) == but_boxes(told[0]) for other in told)
    for fault in ("probe", "start", "first bucket", "mid", "finish", "label"):
        found = told[0][fault]
        assert found["error"].startswith("no-transport: no transport brought e1-v1"), fault
        whole = (False, "e1-v1" if fault in ("finish", "label") else "")
        dirty = {"finish": ["b"], "label": ["b"]}.get(fault, [] if fault in ("probe", "start") else ["a", "b"])
        assert found["left"] == [(True, "") if name in dirty else whole for name in ("a", "b")], fault
        assert all(f"mixed: {', '.join(dirty)}" in found["error"] for _ in dirty), fault
        # The next sync sends all of it, and they are whole.
        label = "e1-v1" if fault in ("probe", "start") else "e1-v2"  # of which no engine has seen anything
        assert found["again"] == (label, ("a", "b")), fault
        assert found["boxes"] == [(True, label, False)] * 2, fault


@pytest.mark.parametrize("ranks", [1, on_two])
def test_a_failure_of_the_last_rank_alone_is_everybodys(ranks: int, tmp_path: Any) -> None:
    told = run(ranks, a_rank_fails, str(tmp_path))
    assert all(each["failures"] == told[0]["failures"] for each in told)
    ((transport, phase, touched, message),) = told[0]["failures"]
    assert (transport, phase, touched) == ("fast", "bucket", ("a",))
    assert "broke at mid" in message
    assert told[0]["transport"] == "spare"
    assert told[0]["boxes"] is True


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "paused"), [("start", [False, False]), ("mid", [True, True])])
def test_when_a_rank_dies_untouched_engines_compute_on_and_a_mix_stays_paused(
    fault: str, paused: list[bool], tmp_path: Any
) -> None:
    zero, one = run_ranks(2, a_rank_dies, 2, f"{tmp_path}/root-{fault}")
    assert one.killed
    assert zero.value == {"kind": "rank-timeout", "paused": paused}


@pytest.mark.parametrize("ranks", [1, on_two])
def test_a_transient_failure_is_tried_again_by_the_same_transport(ranks: int, tmp_path: Any) -> None:
    told = run(ranks, transient, str(tmp_path))
    for each in told:
        assert (each["transport"], each["tries"], each["failures"]) == ("fast", 2, 1)
    assert told[0]["boxes"] == (True, False)


def test_a_transport_that_fails_again_and_again_is_benched_and_tried_when_nothing_else_is_left(tmp_path: Any) -> None:
    box, fast, spare = Box("a"), Carrier(fault="start", times=99), Carrier("spare")
    with a_sync(str(tmp_path), [fast, spare], [box]) as sync:
        model = model_of(0, 1)
        for _ in range(4):
            assert sync.sync(model).transport == "spare"
        assert len(fast.sent_to) == 2, "benched after two syncs"
        spare.fault, spare.times, fast.times = "start", 99, 0
        done = sync.sync(model)
    assert (done.transport, [f.transport for f in done.failures]) == ("fast", ["spare"])


def test_it_is_probed_again_after_a_failure_and_not_before_each_sync(tmp_path: Any) -> None:
    probed: list[str] = []

    class Probed(Carrier):
        def probe(self, engines: Any) -> str | None:
            probed.append(self.name)
            return None

    with a_sync(str(tmp_path), [Probed(fault="start"), Probed("spare")], [Box("a")]) as sync:
        for _ in range(3):
            sync.sync(model_of(0, 1))
    assert probed == ["fast", "spare", "fast"]


def test_a_probe_that_breaks_is_a_no(tmp_path: Any) -> None:
    class Broken(Carrier):
        def probe(self, engines: Any) -> str | None:
            raise OSError("no such device")

    with a_sync(str(tmp_path), [Broken(), Carrier("spare")], [Box("a")]) as sync:
        done = sync.sync(model_of(0, 1))
    assert (done.transport, done.failures[0].message) == (
        "spare", "rank 0: its probe failed: OSError: no such device",
    )  # fmt: skip


def test_without_engines_only_files_are_a_way(tmp_path: Any) -> None:
    with a_sync(str(tmp_path), [Carrier(), Checkpoint()], []) as sync:
        done = sync.sync(model_of(0, 1))
    assert (done.transport, [f.message for f in done.failures]) == ("checkpoint", ["rank 0: no engines were given"])
    assert done.version == sync.version


def test_what_is_against_the_caller_ends_the_sync_with_the_engines_as_they_were(tmp_path: Any) -> None:
    box, spare = Box("a"), Carrier("spare")
    with a_sync(str(tmp_path), [Carrier(fault="start", error=mismatch), spare], [box]) as sync:
        with pytest.raises(SchemaMismatch):
            sync.sync(model_of(0, 1))
        assert (box.paused, box.label, spare.sent_to, sync.version) == (False, "", [], None)
        with pytest.raises(InvalidInput, match="is an iterator"):
            sync.sync(iter(model_of(0, 1).state_dict().items()))
        assert str(sync.sync(model_of(0, 1)).version) == "e1-v1", "what was refused took no number"


def test_an_engine_that_somebody_else_has_paused_is_left_alone(tmp_path: Any) -> None:
    box, fast = Box("a"), Carrier()
    with a_sync(str(tmp_path), [fast, Carrier("files", pauses=False)], [box]) as sync:
        box.paused = True
        done = sync.sync(model_of(0, 1))
    assert [(f.transport, f.phase) for f in done.failures] == [("fast", "pause")] * 2
    assert fast.sent_to == []
    assert box.paused


def test_an_engine_that_a_dead_trainer_left_paused_is_whole_after_the_first_full_send(tmp_path: Any) -> None:
    box = Box("a", label="e1-v7", paused=True, mixed=True)
    with a_sync(str(tmp_path), [Carrier(fault="start")], [box]) as sync:
        with pytest.raises(NoTransport, match="mixed: a"):
            sync.sync(model_of(0, 1))
        assert box.paused, "not resumed, though this send has not touched it"
        sync.sync(model_of(0, 1))
    assert (holds(box), box.label, box.paused) == (True, "e1-v1", False)


def test_an_engine_that_does_not_answer_is_behind_and_catches_up(tmp_path: Any) -> None:
    a, b = Box("a"), Box("b")
    with a_sync(str(tmp_path), [Carrier(), Checkpoint()], [a, b]) as sync:
        sync.sync(model_of(0, 1))
        b.deaf = True
        done = sync.sync(model_of(0, 1))
        assert (done.transport, done.behind) == ("checkpoint", {"a": "e1-v1", "b": "b does not answer"})
        assert str(sync.version) == "e1-v1", "not every engine has confirmed it"
        b.deaf = False
        done = sync.sync(model_of(0, 1))
    assert (done.behind, "b" in done.caught_up, str(sync.version)) == ({}, True, "e1-v3")
    assert holds(b)


def test_an_engine_that_lets_a_question_time_out_is_asked_once_in_a_sync_and_no_transport_is_benched(
    tmp_path: Any, caplog: Any
) -> None:
    a, b, fast = Box("a"), Box("b"), Carrier()
    with a_sync(str(tmp_path), [fast, Carrier("spare"), Checkpoint()], [a, b]) as sync:
        sync.sync(model_of(0, 1))
        b.silent_at = ("status", "pause", "resume")
        for _ in range(3):  # one more than QUICK gives a transport that fails
            b.asked.clear()
            done = sync.sync(model_of(0, 1))
            assert (b.asked, done.transport, done.behind["b"]) == (["status"], "checkpoint", "b does not answer")
            assert [(f.transport, f.phase, f.touched) for f in done.failures] == [
                ("fast", "pause", ()), ("spare", "pause", ()),
            ]  # fmt: skip
            assert not a.paused
        assert "b does not answer" in caplog.text
        b.silent_at = ()
        done = sync.sync(model_of(0, 1))
    assert (done.transport, done.confirmed, done.failures) == ("fast", ("a", "b"), ())


def test_a_silent_engine_gets_one_short_question_in_the_next_sync(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(engines, "SHORT_SECONDS", 0.05)
    box = Box("a")
    with a_sync(str(tmp_path), [Carrier(), Checkpoint()], [box]) as sync:
        sync.sync(model_of(0, 1))
        box.silent_at = ("status",)
        sync.sync(model_of(0, 1))
        box.silent_at, box.hangs = (), ("status",)
        box.asked.clear()
        done = sync.sync(model_of(0, 1))
        assert (box.asked, done.transport) == (["status"], "checkpoint")
        assert "a has not answered for 0.05 s" in caplog.text
        box.hangs = ()
        box.wakes.set()
        assert sync.sync(model_of(0, 1)).confirmed == ("a",)


def test_a_pause_that_times_out_may_wait_for_requests_and_is_undone_if_the_engine_answers(tmp_path: Any) -> None:
    class Busy(Box):
        def pause(self) -> None:
            self.paused = True  # at the end of the requests, after the time for an answer
            super().pause()

    box = Busy("a", silent_at=("pause",))
    with a_sync(str(tmp_path), [Carrier(), Checkpoint()], [box]) as sync:
        done = sync.sync(model_of(0, 1))
    assert [f.phase for f in done.failures] == ["pause", "pause"], "it computes, so it is worth another try"
    assert (box.asked.count("resume"), box.paused, done.behind) == (2, False, {"a": "no version"})


def test_an_engine_that_falls_silent_in_the_pause_is_named_and_resumed_by_the_next_sync(tmp_path: Any) -> None:
    class Freezing(Box):
        def pause(self) -> None:
            self.paused = True
            raise self.falls_silent()

    box = Freezing("a")
    with a_sync(str(tmp_path), [Carrier()], [box]) as sync:
        with pytest.raises(NoTransport, match="Maybe left paused, as they were, until the next sync: a"):
            sync.sync(model_of(0, 1))
        assert box.asked[-1] == "status", "one question more, and no resume that would wait as long"
        box.silent_at, box.pause = (), lambda: None  # type: ignore[method-assign]
        assert sync.sync(model_of(0, 1)).confirmed == ("a",)
    assert not box.paused


def test_an_engine_that_falls_silent_after_its_data_stays_dirty_until_it_says_that_it_holds_them(tmp_path: Any) -> None:
    box, fast = Box("a"), Carrier(victim="a")
    fast.error = lambda _: box.falls_silent()
    fast.fault = "lost answer"
    with a_sync(str(tmp_path), [fast, Checkpoint()], [box]) as sync:
        done = sync.sync(model_of(0, 1))
        assert (done.transport, done.dirty, box.paused) == ("checkpoint", ("a",), True)
        assert [(f.transport, f.phase) for f in done.failures] == [("fast", "finish")], "not tried again"
        asked = box.asked[box.asked.index("pause") + 1 :]
        assert asked == ["status"], "it might just have been late"
        box.silent_at = ()
        box.resume()  # its watcher
        assert sync.sync(model_of(0, 1)).confirmed == ("a",)
    assert holds(box)


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_does_not_even_say_where_it_is_keeps_no_sync_from_files(tmp_path: Any, answers: bool) -> None:
    class Actor(Box):
        @property
        def url(self) -> str:
            if self.deaf:
                raise EngineUnavailable(f"{self.name} is being started again")
            return super().url

    box, actor, fast = Box("a"), Actor("b"), Carrier(victim="a", fault="lost answer")

    def dies(_: str) -> EngineUnavailable:
        actor.deaf = True
        return EngineUnavailable("a broke off") if answers else box.falls_silent()

    fast.error = dies
    with a_sync(str(tmp_path), [fast, Checkpoint()], [box, actor]) as sync:
        assert sync.sync(model_of(0, 1)).transport == "checkpoint"
    assert actor.deaf


def test_closing_a_sync_closes_its_transports(tmp_path: Any) -> None:
    fast = Carrier()
    a_sync(str(tmp_path), [fast], []).close()
    assert fast.closed


def test_a_lost_answer_of_an_engine_that_holds_the_version_costs_nothing(each_told: list[Any]) -> None:
    for found in (each["lost answer"] for each in each_told):
        assert found["result"] == ("e1-v1", "fast", ("a", "b"), (), "e1-v1")
        assert found["resent to"] == []
    assert each_told[0]["lost answer"]["boxes"] == [(True, "e1-v1", False)] * 2
