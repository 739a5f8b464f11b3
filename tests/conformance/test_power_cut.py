"""The power is cut, for real: an ext4 file system is shut down without a flush, mounted again, and looked at.

`LosesPower` plays a server that lies about durability; here it is asked whether ours is.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.digest import digest
from ckptsync.errors import NotFound
from ckptsync.publish import Publisher
from ckptsync.store import LocalStore
from ckptsync.store.base import Store, put_bytes, read_bytes
from ckptsync.testing import power
from ckptsync.testing.crashes import crash_points, killed_at
from ckptsync.verify import verify_version
from watchers import journal
from watchers.stage import Stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not power.can_cut(), reason="needs root, to mount a disk of its own"),
]

OLD, NEW = b"old" * 100, b"new" * 5000


@pytest.fixture
def disk(tmp_path: Any) -> Iterator[power.Disk]:
    with power.Disk(str(tmp_path)) as disk:
        yield disk


def replaced(store: Store) -> None:
    put_bytes(store, "folder/replaced", NEW)


def created(store: Store) -> None:
    store.create("folder/created", NEW)


def written(store: Store) -> None:
    put_bytes(store, "new-folder/below/written", NEW)


WAYS: dict[str, tuple[Callable[[Store], None], str]] = {
    "replaced": (replaced, "folder/replaced"),
    "created": (created, "folder/created"),
    "written": (written, "new-folder/below/written"),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_store_has_said_yes_to_is_there_after_a_power_cut(disk: power.Disk, way: str) -> None:
    write, path = WAYS[way]
    prepared(disk)
    write(LocalStore(disk.root))
    power.cut(disk.root)
    disk.restart()
    assert read_bytes(LocalStore(disk.root), path, 1 << 20) == NEW


CALLS = ("open", "mkdir", "write", "pwrite", "pwritev", "fsync", "rename", "link", "unlink", "close")
"""What is asked of the kernel to write a file."""

NEVER = 1 << 30
FORKED = multiprocessing.get_context("fork")
"""Children that need not import anything: what they do starts no thread of torch's."""


def cut_at_call(work: Callable[[Store], object], root: str, at: int, store: Store) -> None:
    """Do the work, but for the `at`-th call to the kernel and what comes after it."""
    real, calls, one = {name: getattr(os, name) for name in CALLS}, itertools.count(), threading.Lock()

    def counted(name: str, *args: Any, **kwargs: Any) -> Any:
        with one:
            if next(calls) == at:
                mock.patch.stopall()
                power.cut(root)
                os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*args, **kwargs)

    for name in CALLS:
        mock.patch.object(os, name, partial(counted, name)).start()
    work(store)
    mock.patch.stopall()


def cut_at_each_call(
    work: Callable[[Store], object], disk: power.Disk, prepare: Callable[[], object], step: int = 1
) -> Iterator[int]:
    """Numbers of calls after which the power was cut; at each the disk is up again."""
    for at in range(0, 1000, step):
        prepare()
        cut = partial(cut_at_call, work, disk.root, at)
        if not killed_at(cut, disk.root, NEVER, context=FORKED):
            return
        disk.restart()
        yield at


@pytest.mark.parametrize("way", ["replaced", "created"])
def test_cut_at_each_call_to_the_kernel_a_file_is_what_it_was_or_whole(disk: power.Disk, way: str) -> None:
    write, path = WAYS[way]
    seen = []
    for at in cut_at_each_call(write, disk, partial(prepared, disk)):
        seen.append(content(disk, path))
        assert seen[-1] in (OLD if way == "replaced" else None, NEW), f"after {at} calls"
    assert len(seen) > 5
    assert seen == sorted(seen, key=lambda found: found == NEW), "once it is there it stays"


def content(disk: power.Disk, path: str) -> bytes | None:
    try:
        return read_bytes(LocalStore(disk.root), path, 1 << 20)
    except NotFound:
        return None


def prepared(disk: power.Disk) -> None:
    """A disk that holds one old file, for good."""
    shutil.rmtree(os.path.join(disk.root, "new-folder"), ignore_errors=True)
    store = LocalStore(disk.root)
    store.delete("folder/created")
    put_bytes(store, "folder/replaced", OLD)
    os.sync()


@pytest.mark.parametrize("of", ["files", "folders"])
def test_a_store_without_fsync_is_found_out(disk: power.Disk, of: str) -> None:
    """So a cut does take away what was not asked for."""
    real = os.fsync

    def left_out(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) != (of == "folders"):
            real(handle)

    prepared(disk)
    with mock.patch.object(os, "fsync", left_out):
        created(LocalStore(disk.root))
    power.cut(disk.root)
    disk.restart()
    assert content(disk, "folder/created") != NEW


# A publish


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.weight": torch.full((8, 8), value) for n in range(2)}


def publish(store: Store) -> None:
    with Publisher(store, sweep_after=None) as publisher:
        publisher.publish(weights(2.0))


def test_case_21_cut_at_each_operation_of_a_publish_readers_find_the_old_version_or_the_whole_new_one(
    disk: power.Disk,
) -> None:
    numbers = iter(range(1000))

    def fresh() -> str:
        root = f"{disk.root}/{next(numbers)}"
        with Publisher(root) as publisher:
            publisher.publish(weights(1.0))
        return root

    newest = []
    crashes = crash_points(publish, fresh, just_before=partial(power.cut, disk.root), context=FORKED)
    for crash in crashes:
        disk.restart()
        channel = Channel.open(crash.root)
        newest.append(channel.latest().id.label)
        for version in channel.committed():
            assert verify_version(channel, version).ok, crash
        publish(LocalStore(crash.root))
    assert newest == sorted(newest)
    assert set(newest) == {"e1-v1", "e2-v2"}


# A stage


def stage(folder: str, root: str, store: Store) -> None:
    channel = Channel.open(root)
    Stage(folder).stage(channel, channel.latest())


def test_cut_at_each_call_a_stage_gives_the_right_bytes_after_the_reboot(
    disk: power.Disk, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage does not fsync, so files may hold zeros: its journal believes nothing of another boot."""
    root, folder = str(tmp_path / "root"), f"{disk.root}/stage"
    with Publisher(root) as publisher:
        publisher.publish(weights(1.0))
    channel = Channel.open(root)
    manifest = channel.latest()
    prepare, boots = partial(shutil.rmtree, folder, ignore_errors=True), 0
    for _ in cut_at_each_call(partial(stage, folder, root), disk, prepare, step=3):
        boots += 1
        monkeypatch.setattr(journal, "boot_id", lambda boot=boots: f"boot {boot}")
        staged = Stage(folder).stage(channel, manifest)
        for name, file in manifest.files():
            assert digest(Path(staged.folder, name).read_bytes()) == file.digest
    assert boots > 10
