"""Rank 0 is killed, interrupted or refused at every step of a publish: what readers see, and what comes
next."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.errors import StoreDenied, StoreError, StoreFull, StoreUnavailable
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.testing.crashes import changes_of, crash_points
from ckptsync.testing.hooks import CHANGES, Crashing, Failing, HookedStore, matching
from ckptsync.verify import verify_version
from tests.trainer.ranks_harness import clean_processes, run_ranks

OLD, NEW, NEXT = ({f"layers.{n}.weight": torch.full((8, 8), value) for n in range(4)} for value in (1.0, 2.0, 3.0))
SHARDS = 600
"""Bytes per shard: two layers each."""


@pytest.fixture(scope="module")
def channel_with_one_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("before")
    with Publisher(str(root), shard_bytes=SHARDS) as publisher:
        publisher.publish(OLD)
    return root


@pytest.fixture(scope="module")
def steps(channel_with_one_version: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """The changing operations of a publisher's whole life: claim, publish, commit, head."""
    root = str(tmp_path_factory.mktemp("recorded") / "root")
    shutil.copytree(channel_with_one_version, root)
    return changes_of(publish, open_store(root))


@pytest.fixture
def fresh_root(channel_with_one_version: Path, tmp_path: Path) -> Callable[[], str]:
    numbers = iter(range(10_000))

    def make() -> str:
        root = tmp_path / str(next(numbers))
        shutil.copytree(channel_with_one_version, root)
        return str(root)

    return make


def publish(store: object) -> None:
    """Without the sweep at the start: what it is refused is a warning, and has a test of its own."""
    with Publisher(store, shard_bytes=SHARDS, sweep_after=None) as publisher:
        publisher.publish(NEW)


def check_readers_see_old_or_new(root: str) -> str:
    """Every committed version is whole, and the newest one is v1 or the complete v2."""
    channel = Channel.open(root)
    latest = channel.latest()
    for version in channel.committed():
        assert verify_version(channel, version).ok
    assert latest.id.number in (1, 2)
    return latest.id.label


def check_the_next_publish_works(root: str) -> None:
    with Publisher(root, shard_bytes=SHARDS) as publisher:
        done = publisher.publish(NEXT)
    channel = Channel.open(root)
    assert channel.latest().id == done.version
    assert verify_version(channel, done.version).ok


def test_killed_before_every_store_operation_a_reader_sees_the_old_version_or_the_whole_new_one(
    steps: list[tuple[str, str]], fresh_root: Callable[[], str]
) -> None:
    seen = []
    for crash in crash_points(publish, fresh_root, context=clean_processes()):
        seen.append(check_readers_see_old_or_new(crash.root))
        check_the_next_publish_works(crash.root)
    manifest = steps.index(("create", "manifests/e0002-v00000002.json"))
    assert seen == ["e1-v1"] * (manifest + 1) + ["e2-v2"] * (len(steps) - manifest - 1)


def crash_on_ranks(rank: int, root: str, at: int) -> None:
    publish(HookedStore(open_store(root), Crashing(at)) if rank == 0 else root)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "latest"),
    [
        (("append", "00002-of-00002.safetensors"), "e1-v1"),
        (("create", "manifests/e0002-v00000002.json"), "e1-v1"),
        (("commit", "head.json"), "e2-v2"),
    ],
)
def test_killed_on_rank_0_of_two_the_other_rank_raises_and_readers_see_old_or_new(
    step: tuple[str, str], latest: str, steps: list[tuple[str, str]], fresh_root: Callable[[], str]
) -> None:
    root = fresh_root()
    at = max(n for n, (operation, path) in enumerate(steps) if operation == step[0] and path.endswith(step[1]))
    zero, one = run_ranks(2, crash_on_ranks, root, at)
    assert zero.killed
    assert one.error is not None
    assert one.error.kind == "RankTimeout"
    assert check_readers_see_old_or_new(root) == latest
    check_the_next_publish_works(root)


ERRORS = {
    "SIGINT": KeyboardInterrupt,
    "ENOSPC": lambda: StoreFull("no space left on device"),
    "EDQUOT": lambda: StoreFull("disk quota exceeded"),
    "EACCES": lambda: StoreDenied("permission denied"),
    "EIO": lambda: StoreError("input/output error"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS.keys())
def test_case_18_20_21_refused_at_every_store_operation_the_error_comes_out_and_nothing_is_half_there(
    error: Callable[[], BaseException], steps: list[tuple[str, str]], fresh_root: Callable[[], str]
) -> None:
    kind = type(error())
    for at, (operation, path) in enumerate(steps):
        root, count = fresh_root(), iter(range(10_000))
        fail = Failing(error, lambda op, _, at=at, count=count: op in CHANGES and next(count) == at, times=1)
        hint = path == "head.json" and kind is not KeyboardInterrupt
        if hint:
            publish(HookedStore(open_store(root), fail))
        else:
            with pytest.raises(kind):
                publish(HookedStore(open_store(root), fail))
        label = check_readers_see_old_or_new(root)
        # Interrupted in the very commit nobody can say whether it will land, so its files have to stay.
        if kind is not KeyboardInterrupt or not path.startswith("manifests/"):
            check_no_debris(root, f"{operation} {path}")
        assert label == "e1-v1" or path == "head.json"
        check_the_next_publish_works(root)


def check_no_debris(root: str, step: str) -> None:
    """Every data folder that holds a file belongs to a manifest: the failed attempt took its files away."""
    channel = Channel.open(root)
    kept = {channel.manifest(version).folder for version in channel.committed()}
    left = {os.path.dirname(f"data/{e.path.removeprefix('data/')}") for e in channel.store.list("data")}
    assert left <= kept, f"after a failure at {step}"


def test_case_44_a_commit_whose_answer_was_lost_is_told_from_one_that_never_came(
    fresh_root: Callable[[], str],
) -> None:
    lost = Failing(lambda: StoreUnavailable("timed out"), matching("create", part="manifests/"), times=1)
    root = fresh_root()
    publish(HookedStore(open_store(root), after=lost))
    assert Channel.open(root).latest().id.label == "e2-v2"


def test_while_nobody_can_tell_whether_the_commit_landed_its_files_stay_and_the_number_is_not_used_again(
    fresh_root: Callable[[], str],
) -> None:
    root = fresh_root()
    lost = Failing(lambda: StoreUnavailable("timed out"), matching("create", part="manifests/"), times=1)
    down = Failing(lambda: StoreUnavailable("timed out"), matching("open", part="manifests/e0002"), times=1)
    with Publisher(HookedStore(open_store(root), down, after=lost), shard_bytes=SHARDS) as publisher:
        with pytest.raises(StoreUnavailable):
            publisher.publish(NEW)
        assert check_readers_see_old_or_new(root) == "e2-v2", "it had landed"
        assert publisher.publish(NEXT).version.label == "e2-v3"


def test_a_delete_that_fails_does_not_hide_the_first_error(
    fresh_root: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    def hook(operation: str, path: str) -> None:
        if operation == "delete" and path.startswith("data/"):
            raise StoreDenied("may not delete")
        if operation == "commit" and path.endswith("00002-of-00002.safetensors"):
            raise StoreFull("no space left on device")

    root = fresh_root()
    with caplog.at_level(logging.WARNING), pytest.raises(StoreFull, match="no space"):
        publish(HookedStore(open_store(root), hook))
    assert "left to be swept: may not delete" in caplog.text
    assert check_readers_see_old_or_new(root) == "e1-v1"
    check_the_next_publish_works(root)


def test_case_6_the_manifest_is_created_after_every_file_was_committed_and_only_the_head_comes_after(
    steps: list[tuple[str, str]],
) -> None:
    create = steps.index(("create", "manifests/e0002-v00000002.json"))
    before = [path.rpartition("/")[2] for operation, path in steps[:create] if operation == "commit"]
    assert before[-4:] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "ckptsync.json",
    ]
    assert {path for _, path in steps[create + 1 :]} == {"head.json"}
