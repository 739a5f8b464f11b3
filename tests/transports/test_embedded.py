"""The whole chain on CPUs: gloo into a real embedded server, its watcher behind it, faults at each phase."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ckptsync.channel import Channel
from ckptsync.sync import WeightSync
from ckptsync.transports import Checkpoint, Gloo
from ckptsync.transports.chain import Patience
from tests.envs.models import tiny_model
from tests.lora.models import randomise, with_adapter
from tests.trainer.ranks_harness import returned, run_ranks
from tests.waiting import until
from tests.watcher.test_embedded import Server
from watchers.engines.embedded import EmbeddedEngine
from watchers.watcher import Watcher

from .fakes import PHASES
from .faulty import FaultyGloo, content_digest, trained
from .jobs import frozen

pytestmark = pytest.mark.slow

on_two = pytest.param(2, marks=pytest.mark.distributed)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(str(tmp_path_factory.mktemp("model")), 0, tied=True)


@pytest.fixture
def serve(model: str) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(port: int = 0) -> Server:
        servers.append(Server(model, port))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@contextmanager
def watching(root: str, url: str, stage: str, **options: Any) -> Iterator[Watcher]:
    Channel.create(root)
    engine, stop = EmbeddedEngine(url, timeout=30), threading.Event()
    watcher = Watcher(root, engine, stage=stage, reader="node0", poll=0.05, **options)
    thread = threading.Thread(target=watcher.run, args=(stop,))
    thread.start()
    try:
        yield watcher
    finally:
        stop.set()
        thread.join()
        watcher.close()
        engine.close()


def read_back(url: str) -> tuple[str, str]:
    """Label and fingerprint from the live tensors; the server compares a version from files with its manifest."""
    with closing(EmbeddedEngine(url)) as engine:
        found = engine._ask("GET", "/fingerprint")
    return found["label"], found["fingerprint"]


def each_fault(rank: int, ranks: int, root: str, url: str, folder: str) -> list[dict[str, Any]]:
    """One training, with another fault at each step."""
    gloo, told = FaultyGloo(seconds=20), []
    options = {"patience": Patience(tries=1, bench_after=99), "bucket_bytes": 200_000, "timeout": 60}
    engine = EmbeddedEngine(url)
    with closing(engine), WeightSync([gloo, Checkpoint(wait=60)], channel=root, engines=[engine], **options) as sync:
        for step, fault in enumerate([*PHASES, ""], 1):
            state = trained(folder, step, ranks)
            gloo.fault = fault
            done = sync.sync(state, step=step)
            told.append({
                "fault": fault, "version": str(done.version), "transport": done.transport, "behind": done.behind,
                "failures": [(f.transport, f.phase, bool(f.touched)) for f in done.failures],
                "counter": str(sync.version), "trained": content_digest(folder, step),
                "read back": read_back(url) if rank == 0 else None,
                "file": done.file.content_digest if done.file else "",
            })  # fmt: skip
    return told


EXPECTED = {
    "probe": ("checkpoint", [("gloo", "probe", False)]),
    "start": ("checkpoint", [("gloo", "start", False)]),
    "first bucket": ("checkpoint", [("gloo", "bucket", True)]),
    "mid": ("checkpoint", [("gloo", "bucket", True)]),
    "finish": ("checkpoint", [("gloo", "finish", True)]),
    "label": ("checkpoint", [("gloo", "finish", True)]),
    "lost answer": ("gloo", []),
    "": ("gloo", []),
}


@pytest.mark.parametrize("ranks", [1, on_two])
def test_a_fault_at_each_phase_ends_in_the_trained_weights_read_back_from_the_server(
    ranks: int, serve: Callable[..., Server], model: str, tmp_path: Any
) -> None:
    server, root = serve(), str(tmp_path / "root")
    with watching(root, server.url, str(tmp_path / "stage")) as watcher:
        arguments = (ranks, root, server.url, model)
        told = [each_fault(0, *arguments)] if ranks == 1 else returned(run_ranks(2, each_fault, *arguments))
        until(lambda: watcher.health.version == told[0][-1]["version"], what="the watcher believes the last label")
    assert all([{**each, "read back": None} for each in rank] == [{**each, "read back": None} for each in told[0]]
               for rank in told)  # fmt: skip
    for number, found in enumerate(told[0], 1):
        fault = found["fault"]
        assert (found["transport"], found["failures"]) == EXPECTED[fault], fault
        assert found["version"] == found["counter"] == found["read back"][0] == f"e1-v{number}", fault
        assert found["behind"] == {}, fault
        if found["transport"] == "gloo":
            assert found["read back"][1] == found["trained"], fault
        else:
            assert found["file"] == found["trained"], fault
            assert found["read back"][1], fault
    assert server.generate()["version"] == told[0][-1]["version"]


@pytest.mark.distributed
def test_an_engine_whose_process_is_stopped_costs_one_timeout_and_the_next_sync_one_question(
    serve: Callable[..., Server], model: str, tmp_path: Any
) -> None:
    server = serve()
    try:
        told = returned(run_ranks(2, frozen, 2, str(tmp_path / "root"), server.url, server.process.pid, model))
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert [{**each, "asked": None, "left": None} for each in told[1]] == [
        {**each, "asked": None, "left": None} for each in told[0]
    ]
    before, stopped, still, woken, mid = told[0]
    for each in (before, woken):
        assert (each["by"], each["confirmed"], each["failures"]) == ("gloo", 1, [])
    for each in (stopped, still):
        assert (each["by"], each["failures"]) == ("checkpoint", [("gloo", "pause", False)])
        assert each["asked"] == ["status"] * 2, "by the sync, and by files' waiting"
    assert "timed out" in stopped["behind"][0]
    assert (mid["by"], mid["failures"], mid["dirty"]) == ("checkpoint", [("gloo", "bucket", True)], 1)
    assert mid["asked"][mid["asked"].index("bucket") :] == ["bucket", "bucket", "status", "status"], (
        "once shortly, and by files"
    )
    assert mid["left"].paused, "it is never resumed on a mix"


def test_an_adapter_by_gloo_goes_into_a_server_that_was_started_on_one(tmp_path: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model(str(tmp_path / "base"), 1, dtype="float32"))
    trained, prompt = with_adapter(base, 1), [1, 2, 3, 4]
    trained.save_pretrained(str(tmp_path / "adapter"))
    with closing(Server(str(tmp_path / "adapter"))) as server, closing(EmbeddedEngine(server.url)) as engine:
        first = server.generate(token_ids=prompt, max_new_tokens=8)["token_ids"]
        randomise(trained, 5)
        with WeightSync([Gloo(seconds=20)], channel=str(tmp_path / "root"), engines=[engine]) as sync:
            done = sync.sync(trained, kind="adapter")
        assert (done.transport, engine.version()) == ("gloo", done.version)
        served = server.generate(token_ids=prompt, max_new_tokens=8)
    ids = torch.tensor([prompt])
    whole = trained.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    assert (served["token_ids"], served["version"]) == (whole[0, len(prompt) :].tolist(), "e1-v1")
    assert served["token_ids"] != first


def test_a_version_that_came_by_gloo_is_not_loaded_again_from_its_files(
    serve: Callable[..., Server], model: str, tmp_path: Any
) -> None:
    server, root = serve(), str(tmp_path / "root")
    with watching(root, server.url, str(tmp_path / "stage")) as watcher:
        engine = EmbeddedEngine(server.url)
        with closing(engine), WeightSync([Gloo()], channel=root, engines=[engine], persist_every=2) as sync:
            files = [sync.sync(trained(model, step, 1), step=step).file for step in range(1, 5)]
        until(lambda: watcher.health.version == "e1-v4")
        assert [file is not None for file in files] == [False, True, False, True]
        assert [str(v) for v in Channel.open(root).versions()] == ["e1-v2", "e1-v4"]
        assert files[3].result().content_digest == read_back(server.url)[1] == content_digest(model, 4)
        assert Channel.open(root).receipt("node0") == {}, "the watcher has loaded nothing"
        assert watcher.health.ready


def test_an_engine_killed_in_mid_send_gets_the_newest_files_says_that_it_is_behind_and_catches_up(
    serve: Callable[..., Server], model: str, tmp_path: Any
) -> None:
    server, root = serve(), str(tmp_path / "root")
    gloo = FaultyGloo(seconds=20)
    patience = Patience(tries=1, bench_after=99)
    with watching(root, server.url, str(tmp_path / "stage")) as watcher:
        engine = EmbeddedEngine(server.url)
        options = {
            "channel": root,
            "engines": [engine],
            "persist_every": 2,
            "patience": patience,
            "bucket_bytes": 200_000,
        }
        with closing(engine), WeightSync([gloo], **options) as sync:
            for step in (1, 2, 3):
                sync.sync(trained(model, step, 1), step=step)
            until(lambda: watcher.health.version == "e1-v3")
            gloo.fault, gloo.act = "mid", server.kill
            with pytest.raises(Exception, match="no transport brought e1-v4"):
                sync.sync(trained(model, 4, 1), step=4)
            assert str(sync.version) == "e1-v3", "a send that failed does not advance it"
            again = serve(port=server.port)
            until(lambda: watcher.health.version == "e1-v2", what="the newest files are loaded")
            assert watcher.health.reason.startswith("behind: e1-v3 came to the engine without files")
            done = sync.sync(trained(model, 5, 1), step=5)
            assert (done.caught_up, str(sync.version)) == ((engine.name,), "e1-v5")
            until(lambda: watcher.health.version == "e1-v5")
            assert watcher.health.reason == ""
        assert again.generate()["version"] == "e1-v5"
        assert read_back(again.url) == ("e1-v5", content_digest(model, 5))


def test_of_two_engines_only_the_one_that_missed_the_end_is_dirty_and_gets_files(
    serve: Callable[..., Server], model: str, tmp_path: Any
) -> None:
    servers, root = [serve(), serve()], str(tmp_path / "root")
    engines = [EmbeddedEngine(server.url) for server in servers]
    gloo = FaultyGloo(seconds=20)
    gloo.fault, gloo.victim = "finish", servers[1].url
    options = {"channel": root, "engines": engines, "patience": Patience(tries=1)}
    with (
        closing(engines[0]),
        closing(engines[1]),
        WeightSync([gloo, Checkpoint(wait=60)], **options) as sync,
        watching(root, servers[1].url, str(tmp_path / "stage")) as watcher,
    ):
        done = sync.sync(trained(model, 1, 1), step=1)
        assert watcher.channel.receipt("node0")["label"] == "e1-v1"
    ((transport, phase, touched, _),) = done.failures
    assert (transport, phase, touched) == ("gloo", "finish", tuple(sorted(engine.name for engine in engines)))
    assert (done.transport, done.dirty, str(sync.version)) == ("checkpoint", (), "e1-v1")
    assert read_back(servers[0].url) == ("e1-v1", content_digest(model, 1)), "by gloo, and never touched again"
    assert servers[0].generate()["token_ids"] == servers[1].generate()["token_ids"]


def die_in_mid_send(rank: int, root: str, url: str, folder: str) -> None:
    gloo = FaultyGloo(seconds=20)
    with WeightSync([gloo], channel=root, engines=[EmbeddedEngine(url)], bucket_bytes=200_000, persist_every=1) as sync:
        sync.sync(trained(folder, 1, 1)).file.result()
        gloo.fault, gloo.act = "mid", lambda: os._exit(9)
        sync.sync(trained(folder, 2, 1))


def test_an_engine_that_a_dead_trainer_left_half_loaded_is_brought_back_by_its_watcher(
    serve: Callable[..., Server], model: str, tmp_path: Any
) -> None:
    server, root = serve(), str(tmp_path / "root")
    with watching(root, server.url, str(tmp_path / "stage"), yields=5.0) as watcher:
        (outcome,) = run_ranks(1, die_in_mid_send, root, server.url, model)
        assert outcome.killed
        engine = EmbeddedEngine(server.url)
        with closing(engine):
            until(lambda: not engine.status().paused, what="the watcher takes over")
            assert engine.status().label == "e1-v1"
        until(lambda: watcher.health.ready)
    manifest = Channel.open(root).latest()
    assert (str(manifest.id), manifest.content_digest) == ("e1-v1", content_digest(model, 1))
    assert server.generate()["version"] == "e1-v1"
