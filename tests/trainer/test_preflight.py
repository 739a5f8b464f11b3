"""Is there room, and did anything change: asked before the first byte and before the commit."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckptsync import preflight
from ckptsync.channel import Channel
from ckptsync.errors import InvalidInput, StoreFull, Unchanged
from ckptsync.preflight import available_memory, free_bytes
from ckptsync.publish import Publisher
from ckptsync.ranks import Ranks
from ckptsync.store import open_store
from ckptsync.testing.hooks import HookedStore, Recorder
from tests.trainer.ranks_harness import Caught, catching, returned, run_ranks

STATE = {"w": torch.ones(1 << 20)}


def files_below(root: str) -> list[str]:
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)


def test_a_version_larger_than_the_free_space_is_refused_with_both_numbers_before_the_first_byte(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder)) as publisher:
        recorder.seen.clear()
        real = os.statvfs(root)
        monkeypatch.setattr(preflight.os, "statvfs", lambda _: SimpleNamespace(f_bavail=17, f_frsize=1024))
        said = r"has 4\.2 MB \(4194304 bytes\), 67\.1 MB are kept .*, and 17\.4 KB \(17408 bytes\) are free"
        with pytest.raises(StoreFull, match=said):
            publisher.publish(STATE)
        assert recorder.changes() == []
        monkeypatch.setattr(preflight.os, "statvfs", lambda _: real)
        assert publisher.publish(STATE).version.number == 1


def test_free_space_is_asked_of_folders_only_also_before_they_exist(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "not" / "yet"))
    here = os.statvfs(tmp_path)
    assert free_bytes(store) == pytest.approx(here.f_bavail * here.f_frsize, rel=0.2)
    assert free_bytes(open_store("memory://x")) is None


@pytest.mark.parametrize("background", [False, True])
def test_a_publish_that_needs_more_host_memory_than_there_is_is_refused_with_the_numbers(
    background: bool, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Publisher(root) as publisher:
        peak = preflight.MARGIN + 4 * STATE["w"].nbytes  # a bucket and a tensor, twice
        need = peak + STATE["w"].nbytes if background else peak  # and the snapshot
        monkeypatch.setattr(preflight, "available_memory", lambda: need - 1)
        with pytest.raises(InvalidInput, match=rf"\({need} bytes\) of host memory on 1 rank.*\({need - 1} bytes\)"):
            publisher.publish(STATE, background=background)
        assert Channel.open(root).committed() == []
        monkeypatch.setattr(preflight, "available_memory", lambda: need)
        done = publisher.publish(STATE, background=background)
        assert (done.result() if background else done).version.number == 1


def test_the_memory_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("memory.max", "1000"), ("memory.current", "700"), ("memory.stat", "anon 1\ninactive_file 50")):
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(preflight, "CGROUP", str(tmp_path))
    assert available_memory() == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 1 << 20, "the host's"


def run_short(rank: int, root: str) -> dict[str, Caught]:
    errors: dict[str, Caught] = {}
    preflight.free_bytes = lambda _: 17 if rank == 0 else None
    with Publisher(root, timeout=30) as publisher:
        before = files_below(root)
        with catching(errors, "space"):
            publisher.publish(STATE)
        assert files_below(root) == before, "neither rank has begun a version"
    ranks = Ranks(timeout=30)
    preflight.available_memory = lambda: 1000
    preflight.check_memory(ranks, 500)
    with catching(errors, "sum"):
        preflight.check_memory(ranks, 500 + rank)
    return errors


@pytest.mark.distributed
@pytest.mark.slow
def test_the_ranks_of_one_host_share_its_memory_and_are_refused_together(root: str) -> None:
    found = returned(run_ranks(2, run_short, root))
    for errors in found:
        assert errors["space"].kind == "RankFailed"
        assert "17 B are free" in errors["space"].message
        assert errors["sum"].kind == "InvalidInput"
        assert "(1001 bytes) of host memory on 2 ranks" in errors["sum"].message


def test_case_9_with_require_change_the_same_weights_under_a_new_step_are_refused(root: str) -> None:
    state = {"w": torch.ones(2)}
    with Publisher(root, require_change=True) as publisher:
        publisher.publish(state, step=1)
        with pytest.raises(Unchanged, match=r"step 2 has exactly the weights of e1-v1 \(step 1\)"):
            publisher.publish(state, step=2)
        with pytest.raises(Unchanged):
            publisher.publish(state, step=2, background=True).result()
        with pytest.raises(Unchanged):
            publisher.publish(state)
        assert [str(v) for v in Channel.open(root).committed()] == ["e1-v1"]
        assert len(os.listdir(os.path.join(root, "data"))) == 1, "the refused versions took their files away"
        assert not publisher.publish(state, number=1, step=1).changed, "a retry"
        state["w"] += 1
        assert publisher.publish(state, step=2).changed
