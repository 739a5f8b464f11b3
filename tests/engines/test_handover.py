"""A fast path that breaks off on a real server, and its watcher, which takes the server over with files."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from ckptsync.export.source import CheckpointSource
from ckptsync.sync import Synced, WeightSync
from ckptsync.transports import Checkpoint, Patience, Sending, SyncEngine
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine
from watchers.watcher import Watcher

from .conftest import Server, left_serving, until

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]


class Breaking:
    """Breaks off after the engines count as touched, if `breaks`; else it cannot be used."""

    name, pauses, breaks = "fast", True, False

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        return None if self.breaks else "not today"

    def send(self, sending: Sending) -> None:
        sending.touch(*sending.engines)
        raise RuntimeError("the link went down")

    def close(self) -> None: ...


def adapter(server: Server) -> VllmEngine | SglangEngine:
    return VllmEngine(server.url) if server.engine == "vllm" else SglangEngine(server.url)


@contextmanager
def watching(root: str, server: Server, stage: str) -> Iterator[Watcher]:
    Channel.create(root)
    stop = threading.Event()
    with closing(adapter(server)) as engine:
        watcher = Watcher(root, engine, stage=stage, reader="r", poll=0.1)
        thread = threading.Thread(target=watcher.run, args=(stop,))
        thread.start()
        yield watcher
        stop.set()
        thread.join()
        watcher.close()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_that_a_broken_fast_path_left_paused_serves_the_version_from_files(
    engine: str, request: pytest.FixtureRequest, versions: dict[str, StagedVersion], tmp_path: Any
) -> None:
    server: Server = request.getfixturevalue(f"{engine}_server")
    root, fast, tokens = str(tmp_path / "root"), Breaking(), {}
    with left_serving(adapter(server)) as ours, watching(root, server, str(tmp_path / "stage")) as watcher:
        options: dict[str, Any] = {"channel": root, "engines": [ours], "patience": Patience(tries=1)}
        options["allow_older"] = True  # the server is shared, and may hold what another test gave it
        with WeightSync([fast, Checkpoint(wait=240)], **options) as sync:

            def synced(name: str) -> Synced:
                folder = versions[name].folder
                done = sync.sync(CheckpointSource(folder), assets=folder)
                assert (done.transport, done.confirmed, done.dirty) == ("checkpoint", (ours.name,), ())
                assert ours.version() == sync.version == done.version
                return done

            for name in ("b", "a"):
                synced(name)
                tokens[name] = server.tokens()
            fast.breaks = True
            done = synced("b")
            assert [(f.transport, f.phase, f.touched) for f in done.failures] == [("fast", "start", (ours.name,))]
            assert server.tokens() == tokens["b"] != tokens["a"]
        until(lambda: watcher.health.version == "e1-v3")
