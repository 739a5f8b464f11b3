"""Faults of file systems, each made by a stand-in for one os call, or for real where that is possible."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading

import pytest

from ckptsync.errors import (
    AlreadyExists,
    BadShard,
    NotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ckptsync.store import LocalStore, direct, put_bytes, read_bytes

from .folders import failing, files_on_disk, names

CHUNK = direct.CHUNK


@pytest.fixture
def store(tmp_path: pathlib.Path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"), deadline=0.2)


# Running full, and being refused


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (errno.EDQUOT, StoreFull, "quota"),
        (errno.ENOSPC, StoreFull, "no space left"),
        (errno.EFBIG, StoreFull, "larger than"),
        (errno.EROFS, StoreDenied, "read-only"),
        (errno.EIO, StoreError, "EIO"),
        (errno.ESTALE, StoreUnavailable, "stale"),
    ],
)
@pytest.mark.parametrize("size", [10, 3 * CHUNK + 7])
def test_case_20_a_failed_write_is_named_and_leaves_nothing(
    store: LocalStore, monkeypatch, number: int, error: type[Exception], words: str, size: int
) -> None:
    writer = store.write("data/shard.bin")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(number))

        def write() -> None:
            writer.write(bytes(size))
            writer.commit()

        with pytest.raises(error, match=words) as caught:
            write()
    writer.abort()
    assert caught.value.__cause__.errno == number
    assert "data/shard.bin" in str(caught.value)
    assert files_on_disk(store) == []
    put_bytes(store, "data/shard.bin", b"the next one works")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_a_full_disk_for_real(tmp_path: pathlib.Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", tmp_path], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        store = LocalStore(str(tmp_path))
        with pytest.raises(StoreFull, match="no space left"):
            put_bytes(store, "data/shard.bin", bytes(8 << 20))
        assert files_on_disk(store) == []
        put_bytes(store, "data/shard.bin", bytes(1 << 20))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another uid")
def test_a_folder_of_somebody_else_for_real() -> None:
    """In a process of its own, since root may write everywhere."""
    root = tempfile.mkdtemp()
    try:
        os.mkdir(f"{root}/closed", 0o700)
        os.chmod(root, 0o755)
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        process = context.Process(target=_as_nobody, args=(root, answers))
        process.start()
        assert [answers.get(timeout=60) for _ in range(4)] == ["StoreDenied"] * 4
        process.join()
    finally:
        shutil.rmtree(root)


def _as_nobody(root: str, answers) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    store = LocalStore(root)
    for call in (
        lambda: list(store.list("")),
        lambda: store.open("closed/file"),
        lambda: put_bytes(store, "file", b"x"),
        lambda: store.delete("closed/file"),
    ):
        try:
            call()
            answers.put("no error")
        except Exception as error:
            answers.put(type(error).__name__)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_case_14_what_could_not_be_listed_is_not_taken_for_empty(store: LocalStore, monkeypatch, number: int) -> None:
    put_bytes(store, "manifests/v1.json", b"x")
    monkeypatch.setattr(os, "scandir", failing(number))
    with pytest.raises(StoreError, match="list"):
        list(store.list("manifests"))


def test_case_18_an_interrupted_write_leaves_nothing_and_keeps_the_old_file(store: LocalStore, monkeypatch) -> None:
    put_bytes(store, "head.json", b"old")
    for boundary in ("fsync", "rename"):
        with monkeypatch.context() as patch:

            def interrupted(*args, **kwargs):
                raise KeyboardInterrupt

            patch.setattr(os, boundary, interrupted)
            with pytest.raises(KeyboardInterrupt):
                put_bytes(store, "head.json", b"new")
        assert files_on_disk(store) == ["head.json"]
        assert read_bytes(store, "head.json", 10) == b"old"


def test_case_18_aborting_waits_for_the_write_that_runs(store: LocalStore, monkeypatch) -> None:
    real, began, go_on = os.pwrite, threading.Event(), threading.Event()

    def slow(*args):
        began.set()
        assert go_on.wait(60)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    writer = store.write("data/shard.bin")
    writer.write(bytes(CHUNK + 1))
    assert began.wait(60)
    threading.Timer(0.1, go_on.set).start()
    writer.abort()
    assert files_on_disk(store) == []


# Parallel and network file systems


def test_case_28_a_folder_that_another_rank_just_made_is_no_error(store: LocalStore, monkeypatch) -> None:
    real = os.mkdir

    def made_by_another(*args, **kwargs):
        real(*args, **kwargs)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "mkdir", made_by_another)
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    put_bytes(store, "data/v1/shard.bin", b"x")
    assert names(store) == ["data/v1/shard.bin"]


def test_case_32_a_handle_that_went_stale_once_is_reopened(store: LocalStore, monkeypatch) -> None:
    data = os.urandom(4096) * (CHUNK // 4096 + 1)
    put_bytes(store, "data/shard.bin", data)
    reader = store.open("data/shard.bin")
    monkeypatch.setattr(os, "preadv", failing(errno.ESTALE, times=1, real=os.preadv))
    buffer = bytearray(len(data))
    reader.readinto(0, memoryview(buffer))
    reader.close()
    assert buffer == data


def test_case_32_a_handle_that_stays_stale_is_a_transient_error(store: LocalStore, monkeypatch) -> None:
    put_bytes(store, "data/shard.bin", b"x" * 100)
    reader = store.open("data/shard.bin")
    monkeypatch.setattr(os, "preadv", failing(errno.ESTALE))
    with pytest.raises(StoreUnavailable, match=r"stale.*gave up after"):
        reader.readinto(0, memoryview(bytearray(100)))
    reader.close()


def test_case_32_opening_and_listing_try_again_too(store: LocalStore, monkeypatch) -> None:
    put_bytes(store, "head.json", b"x")
    monkeypatch.setattr(os, "open", failing(errno.ESTALE, times=1, real=os.open))
    assert names(store) == ["head.json"]
    monkeypatch.setattr(os, "open", failing(errno.ESTALE, times=1, real=os.open))
    store.open("head.json").close()


def test_every_descriptor_is_closed(store: LocalStore, monkeypatch) -> None:
    put_bytes(store, "data/shard.bin", bytes(CHUNK * 2))
    before = os.listdir("/proc/self/fd")
    put_bytes(store, "data/v1/shard.bin", bytes(CHUNK * 2 + 1))
    store.create("manifests/v1.json", b"x")
    store.write("data/v1/aborted").abort()
    reader = store.open("data/shard.bin")
    reader.readinto(0, memoryview(bytearray(CHUNK)))
    reader.close()
    reader.close()
    for path in ("absent", "data", "data/absent"):
        with pytest.raises(NotFound):
            store.open(path)
    with pytest.raises(AlreadyExists):
        store.create("manifests/v1.json", b"x")
    assert len(list(store.list(""))) == 3
    store.delete("data/v1/shard.bin")
    assert os.listdir("/proc/self/fd") == before


def test_a_file_that_shrank_after_it_was_opened_is_a_bad_shard(store: LocalStore) -> None:
    put_bytes(store, "data/shard.bin", bytes(CHUNK + 10))
    reader = store.open("data/shard.bin")
    os.truncate(f"{store.url}/data/shard.bin", 100)
    with pytest.raises(BadShard, match="ends at byte 100"):
        reader.readinto(0, direct.aligned(CHUNK + 10))
    reader.close()


def test_a_file_that_vanishes_from_a_listing_is_left_out(store: LocalStore, monkeypatch) -> None:
    put_bytes(store, "a", b"x")
    put_bytes(store, "b", b"x")
    real = os.scandir

    class Vanishing:
        def __init__(self, fd: int) -> None:
            self._entries = real(fd)

        def __enter__(self):
            return self

        def __exit__(self, *error) -> None:
            self._entries.close()

        def __iter__(self):
            for entry in self._entries:
                if entry.name == "a":
                    os.unlink(f"{store.url}/a")
                yield entry

    monkeypatch.setattr(os, "scandir", Vanishing)
    assert names(store) == ["b"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS])
def test_create_works_where_there_are_no_links(store: LocalStore, monkeypatch, number: int) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    store.create("epochs/e1", b"first")
    with pytest.raises(AlreadyExists):
        store.create("epochs/e1", b"second")
    assert read_bytes(store, "epochs/e1", 10) == b"first"
    assert files_on_disk(store) == ["e1"]


def test_a_create_by_o_excl_that_fails_halfway_takes_the_name_back(store: LocalStore, monkeypatch) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    with monkeypatch.context() as patch:
        calls = []

        def second_fails(fd, data, offset, real=os.pwrite):
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "full")
            return real(fd, data, offset)

        patch.setattr(os, "pwrite", second_fails)
        with pytest.raises(StoreFull):
            store.create("epochs/e1", b"first")
    assert files_on_disk(store) == []
