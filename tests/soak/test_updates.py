"""Update after update on a real server that never stops being asked: no request fails, nothing grows, nothing leaks."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckptsync.engine import Engine
from ckptsync.export.source import CheckpointSource
from ckptsync.publish import Publisher
from tests.engines.conftest import Server, Start, models
from tests.waiting import until
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.vllm import VllmEngine, VllmOptions
from watchers.stage import Stage
from watchers.watcher import Watcher

from .load import Load, occupied, resident, slope

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(7200)]

SEEDS = (1, 2, 3)
UPDATES_A_SECOND = 0.5
QUIET, SETTLING = 15, 5
"""Updates without load at the end, and those of them after which the allocator has given back what it will."""

MIB_PER_UPDATE = 0.25
"""Above the noise of an allocator, and below one more copy of the 1.2 MB model with each update. Asked of the quiet
updates: under load vLLM's CPU worker grows without any update too, since its kernels are kept for each batch shape."""

FLAGS = {"vllm": ["--num-gpu-blocks-override", "32"], "sglang": []}
"""A small KV cache: a large one takes its memory page by page, as it is first used, and would look like a leak."""


def adapter(server: Server) -> Engine:
    if server.engine == "vllm":
        return VllmEngine(server.url, VllmOptions(pause_mode="keep"))
    return SglangEngine(server.url, SglangOptions(pause_mode="in_place", cache="keep"))


@dataclass
class Updates:
    """Publishes one of the models after another, and has each loaded; what a server weighs after each."""

    publisher: Publisher
    watcher: Watcher
    folders: list[str]
    server: Server
    pauses: list[float] = field(default_factory=list)

    def run(self, count: int, load: Load | None = None) -> list[float]:
        """`load`: an answer comes between any two updates, however busy the machine is."""
        weights = []
        for _ in range(count):
            if load is not None:
                before = load.ended
                until(lambda before=before: load.ended > before, 150, "a request ends")  # type: ignore[misc]
            weights.append(self._update())
        return weights

    def _update(self) -> float:
        folder = self.folders[len(self.pauses) % len(self.folders)]
        label = self.publisher.publish(CheckpointSource(folder), assets=folder).version.label
        receipt = self.watcher.step()
        assert receipt is not None
        assert (receipt.state, receipt.label, receipt.error) == ("serving", label, None)
        self.pauses.append(receipt.pause_seconds)
        assert self.server.process is not None
        return resident(self.server.process.pid)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_updates_in_a_row_under_load_fail_no_request_and_leave_memory_and_slots_flat(
    engine: str, fresh_server: Start, seconds: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [models.tiny_model(str(tmp_path / f"seed{seed}"), seed) for seed in SEEDS]
    server, root = fresh_server(engine, folders[0], *FLAGS[engine]), str(tmp_path / "root")
    stage = Stage(str(tmp_path / "stage"))
    with Publisher(root) as publisher, closing(adapter(server)) as adapted:
        watcher = Watcher(root, adapted, stage=stage, reader="soak", events=False)
        with closing(watcher):
            updates = Updates(publisher, watcher, folders, server)
            with Load(server) as load:
                busy = updates.run(round(seconds * UPDATES_A_SECOND), load)
            quiet = updates.run(QUIET)
    pauses = sorted(updates.pauses[: len(busy)])
    with capsys.disabled():
        print(
            f"\n{engine}: {len(busy)} updates, {load.answered} requests answered, {len(load.failures)} failed; "
            f"pause median {pauses[len(pauses) // 2]:.3f} s, longest {pauses[-1]:.3f} s; "
            f"MiB {busy[0]:.1f} at first, {busy[-1]:.1f} at the end, {quiet[-1]:.1f} after {QUIET} more without load; "
            f"per update {slope(busy[len(busy) // 2 :]):+.4f} under load, {slope(quiet[SETTLING:]):+.4f} without"
        )
    assert load.failures == []
    assert load.answered >= len(busy), "there was load at every update"
    assert slope(quiet[SETTLING:]) < MIB_PER_UPDATE
    until(lambda: not any(occupied(server).values()), 120, "every request and KV slot is free again")
    (channel,) = os.listdir(stage.folder)
    kept = [name for name in os.listdir(os.path.join(stage.folder, channel)) if not name.startswith(".")]
    assert len(kept) <= stage.keep + 1
