"""Faults of file systems, each made by a stand-in for one os call, or for real where that is possible."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
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
from ckptsync.store import LocalStore, direct, open_store, put_bytes, read_bytes
from ckptsync.store.paths import temporary_name

CHUNK = direct.CHUNK


@pytest.fixture
def store(tmp_path: pathlib.Path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"), deadline=0.2)


def names(store: LocalStore) -> list[str]:
    return sorted(entry.path for entry in store.list(""))


def files_on_disk(store: LocalStore) -> list[str]:
    return sorted(name for _, _, files in os.walk(store.url) for name in files)


def failing(number: int, *, times: int = 1 << 30, real=None):
    """A stand-in for an os call that fails `times` times and then does what `real` does."""
    left = [times]

    def call(*args, **kwargs):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call


# Opening


def test_urls_of_folders(tmp_path: pathlib.Path) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)


def test_nothing_is_made_before_the_first_write(store: LocalStore) -> None:
    assert names(store) == []
    with pytest.raises(NotFound):
        store.open("head.json")
    store.delete("head.json")
    assert not os.path.exists(store.url)


# Modes


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_case_38_files_honour_the_umask(store: LocalStore, umask: int, mode: int) -> None:
    old = os.umask(umask)
    try:
        put_bytes(store, "data/v1/shard.bin", bytes(CHUNK + 1))
        store.create("manifests/v1.json", b"{}")
    finally:
        os.umask(old)
    for path in ("data/v1/shard.bin", "manifests/v1.json"):
        assert os.stat(f"{store.url}/{path}").st_mode & 0o777 == mode


def test_case_38_files_have_the_configured_mode_before_they_are_visible(tmp_path, monkeypatch) -> None:
    store = LocalStore(str(tmp_path), mode=0o640)
    seen: list[int] = []
    for name in ("rename", "link"):
        real = getattr(os, name)

        def recording(source, *args, real=real, **kwargs):
            seen.append(os.stat(source, dir_fd=kwargs["src_dir_fd"]).st_mode & 0o777)
            return real(source, *args, **kwargs)

        monkeypatch.setattr(os, name, recording)
    put_bytes(store, "data/shard.bin", b"x")
    store.create("manifests/v1.json", b"{}")
    assert seen == [0o640, 0o640]
    assert os.stat(tmp_path / "data").st_mode & 0o777 == 0o750


# Durability


class Recorder:
    """The order of those os calls that decide what a power cut leaves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("mkdir", "fsync", "rename", "link", "unlink"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name, real):
        def call(target, *args, **kwargs):
            if name == "fsync":
                folder = os.path.isdir(f"/proc/self/fd/{target}")
                path = os.readlink(f"/proc/self/fd/{target}")
                self.calls.append(f"fsync {'folder ' + os.path.basename(path) if folder else 'file'}")
            else:
                self.calls.append(name)
            return real(target, *args, **kwargs)

        return call


def test_case_21_a_file_is_durable_before_it_is_visible_and_its_name_before_commit_returns(
    store: LocalStore, monkeypatch
) -> None:
    put_bytes(store, "data/v0/shard.bin", b"x")
    recorder = Recorder(monkeypatch)
    put_bytes(store, "data/v0/shard.bin", bytes(CHUNK * 2 + 5))
    assert recorder.calls == ["fsync file", "rename", "fsync folder v0"]


def test_case_21_a_created_file_is_durable_before_it_is_visible(store: LocalStore, monkeypatch) -> None:
    put_bytes(store, "manifests/v0.json", b"x")
    recorder = Recorder(monkeypatch)
    store.create("manifests/v1.json", b"x")
    assert recorder.calls == ["fsync file", "link", "unlink", "fsync folder manifests"]


def test_case_21_new_folders_are_durable_too(store: LocalStore, monkeypatch) -> None:
    recorder = Recorder(monkeypatch)
    put_bytes(store, "data/v1/shard.bin", b"x")
    assert recorder.calls == [
        "mkdir", f"fsync folder {os.path.basename(os.path.dirname(store.url))}",
        "mkdir", "fsync folder root", "mkdir", "fsync folder data", "fsync file", "rename", "fsync folder v1",
    ]  # fmt: skip


def test_case_21_a_folder_whose_maker_may_have_died_is_made_durable_once(store: LocalStore, monkeypatch) -> None:
    os.makedirs(f"{store.url}/data/v1")
    recorder = Recorder(monkeypatch)
    put_bytes(store, "data/v1/a.bin", b"x")
    assert [call for call in recorder.calls if call.startswith("fsync")] == [
        "fsync folder root", "fsync folder data", "fsync file", "fsync folder v1",
    ]  # fmt: skip
    recorder.calls.clear()
    put_bytes(store, "data/v1/b.bin", b"x")
    assert recorder.calls == ["fsync file", "rename", "fsync folder v1"]


@pytest.mark.parametrize("call", ["fsync", "rename", "close"])
def test_a_failing_commit_raises_and_leaves_nothing(store: LocalStore, monkeypatch, call: str) -> None:
    put_bytes(store, "data/other", b"x")
    writer = store.write("data/shard.bin")
    writer.write(bytes(CHUNK + 5))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.EIO, times=1, real=getattr(os, call)))
        with pytest.raises(StoreError, match="EIO"):
            writer.commit()
    writer.abort()
    assert files_on_disk(store) == ["other"]


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
        assert go_on.wait(20)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    writer = store.write("data/shard.bin")
    writer.write(bytes(CHUNK + 1))
    assert began.wait(20)
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


# Symbolic links


def test_case_85_a_shard_that_is_a_symbolic_link_is_refused(store: LocalStore, tmp_path: pathlib.Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    put_bytes(store, "data/other", b"x")
    os.symlink(tmp_path / "outside", f"{store.url}/data/shard.bin")
    with pytest.raises(StoreDenied, match="symbolic link"):
        store.open("data/shard.bin")
    assert names(store) == ["data/other"]


def test_case_85_a_folder_that_is_a_symbolic_link_is_refused(store: LocalStore, tmp_path: pathlib.Path) -> None:
    put_bytes(LocalStore(str(tmp_path / "outside")), "v1/shard.bin", b"secret")
    put_bytes(store, "head.json", b"x")
    os.symlink(tmp_path / "outside", f"{store.url}/data")
    for call in (
        lambda: store.open("data/v1/shard.bin"),
        lambda: store.write("data/v1/new.bin"),
        lambda: store.delete("data/v1/shard.bin"),
        lambda: list(store.list("data")),
    ):
        with pytest.raises(StoreDenied, match="symbolic link"):
            call()
    assert names(store) == ["head.json"]
    assert (tmp_path / "outside/v1/shard.bin").read_bytes() == b"secret"


def test_case_85_writing_over_a_symbolic_link_replaces_the_link(store: LocalStore, tmp_path: pathlib.Path) -> None:
    (tmp_path / "outside").write_bytes(b"old")
    put_bytes(store, "other", b"x")
    os.symlink(tmp_path / "outside", f"{store.url}/head.json")
    put_bytes(store, "head.json", b"new")
    assert (tmp_path / "outside").read_bytes() == b"old"
    assert read_bytes(store, "head.json", 10) == b"new"


def test_the_root_itself_may_be_a_symbolic_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    put_bytes(LocalStore(str(tmp_path / "link")), "file", b"x")
    assert (tmp_path / "real/file").read_bytes() == b"x"


@pytest.mark.timeout(20)
def test_a_fifo_in_place_of_a_file_does_not_hang_the_reader(store: LocalStore) -> None:
    put_bytes(store, "other", b"x")
    os.mkfifo(f"{store.url}/head.json")
    with pytest.raises(NotFound, match="special file"):
        store.open("head.json")
    assert names(store) == ["other"]


# O_DIRECT


@pytest.mark.parametrize("refuses", ["fcntl", "pwrite"])
def test_a_file_system_without_o_direct_gets_the_same_bytes(store: LocalStore, monkeypatch, refuses: str) -> None:
    data = os.urandom(4096) * (2 * CHUNK // 4096) + b"tail"
    if refuses == "fcntl":
        monkeypatch.setattr(direct, "switch", lambda fd, on: False)
    else:
        monkeypatch.setattr(os, "pwrite", failing(errno.EINVAL, times=1, real=os.pwrite))
    put_bytes(store, "shard.bin", data)
    assert pathlib.Path(store.url, "shard.bin").read_bytes() == data


def test_large_files_are_written_past_the_page_cache(store: LocalStore, monkeypatch) -> None:
    real, seen = os.pwrite, {}

    def recording(fd: int, data: memoryview, offset: int) -> int:
        seen[offset] = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", recording)
    put_bytes(store, "large", bytes(2 * CHUNK + 1))
    assert seen == {0: True, CHUNK: True, 2 * CHUNK: False}
    put_bytes(LocalStore(store.url, direct=False), "cached", bytes(2 * CHUNK + 1))
    assert seen == {0: False, CHUNK: False, 2 * CHUNK: False}


@pytest.mark.parametrize(("offset", "shift"), [(0, 0), (4096, 0), (4096, 1), (100, 100), (100, 0), (4000, 4000)])
def test_reads_of_any_alignment_give_the_same_bytes(store: LocalStore, offset: int, shift: int) -> None:
    data = os.urandom(1 << 20) * 17 + b"tail"
    put_bytes(store, "shard.bin", data)
    reader = store.open("shard.bin")
    arena = direct.aligned(len(data) + 4096)
    view = arena[shift : shift + len(data) - offset]
    reader.readinto(offset, view)
    reader.close()
    assert view == memoryview(data)[offset:]


def test_an_aligned_read_goes_past_the_page_cache(store: LocalStore, monkeypatch) -> None:
    put_bytes(store, "shard.bin", bytes(CHUNK + 10))
    reader = store.open("shard.bin")
    used = []
    real = direct._read_direct
    monkeypatch.setattr(
        direct,
        "_read_direct",
        lambda fd, offset, buffer: used.append(len(buffer)) or real(fd, offset, buffer),
    )
    reader.readinto(0, direct.aligned(CHUNK + 10))
    reader.close()
    assert used == [CHUNK]


# Debris


def test_case_17_temporary_files_are_never_listed(store: LocalStore) -> None:
    store.write("data/v1/shard.bin").write(b"x")
    assert len(files_on_disk(store)) == 1
    assert names(store) == []


def test_case_17_temporary_files_of_the_dead_are_swept_after_the_grace_time(store: LocalStore) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", f"""
import os
from ckptsync.store import LocalStore
writer = LocalStore({store.url!r}).write("data/v1/shard.bin")
writer.write(bytes({CHUNK * 2}))
os.kill(os.getpid(), 9)
"""],
        check=False,
    )  # fmt: skip
    assert killed.returncode == -9
    mine = store.write("data/v1/other.bin")
    assert len(files_on_disk(store)) == 2
    assert store.sweep("data", grace=3600) == 0
    for name in files_on_disk(store):
        os.utime(f"{store.url}/data/v1/{name}", (0, 0))
    assert store.sweep("data", grace=3600) == 1
    mine.commit()
    assert files_on_disk(store) == ["other.bin"]


def test_case_17_a_temporary_file_of_another_host_is_swept_by_its_age_alone(store: LocalStore) -> None:
    put_bytes(store, "data/v1/shard.bin", b"x")
    name = temporary_name().split(".")
    debris = f"{store.url}/data/v1/.ckptsync-tmp.elsewhere.{name[-2]}.{name[-1]}"
    with open(debris, "w"):
        assert store.sweep("", grace=60) == 0
        os.utime(debris, (0, 0))
    assert store.sweep("", grace=60) == 1
    assert names(store) == ["data/v1/shard.bin"]


def test_case_45_two_writers_of_one_path_do_not_share_a_temporary_file(store: LocalStore) -> None:
    one, two = store.write("head.json"), store.write("head.json")
    one.write(b'{"one": 1}')
    two.write(b"{}")
    two.commit()
    one.commit()
    assert read_bytes(store, "head.json", 100) == b'{"one": 1}'
    assert files_on_disk(store) == ["head.json"]


def test_deleting_the_last_file_of_an_attempt_takes_its_folder_too(store: LocalStore) -> None:
    put_bytes(store, "data/v1/model/a", b"x")
    put_bytes(store, "data/v1/b", b"x")
    store.delete("data/v1/model/a")
    assert os.listdir(f"{store.url}/data/v1") == ["b"]
    store.delete("data/v1/b")
    assert os.listdir(store.url) == ["data"]


def test_a_folder_pruned_by_another_process_is_made_again(store: LocalStore) -> None:
    put_bytes(store, "data/v1/a", b"x")
    LocalStore(store.url).delete("data/v1/a")
    put_bytes(store, "data/v1/b", b"x")
    assert names(store) == ["data/v1/b"]


# Several processes


def _create_until_one_wins(root: str, barrier, results) -> None:
    store = LocalStore(root)
    won = 0
    for number in range(50):
        barrier.wait(60)
        try:
            store.create(f"epochs/e{number}", f"{os.getpid()}".encode())
            won += 1
        except AlreadyExists:
            pass
    results.put(won)


def test_of_two_processes_that_create_one_name_one_wins(store: LocalStore) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_create_until_one_wins, args=(store.url, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert sum(results.get(timeout=60) for _ in processes) == 50
    for process in processes:
        process.join()
    assert len(names(store)) == 50


@pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "as torch allocates"])
def test_pieces_of_any_alignment_and_order_come_back_byte_for_byte(store: LocalStore, shift: int) -> None:
    memory = direct.aligned(40 << 20)
    memory[:] = os.urandom(1 << 20) * 40
    pieces = [memory[shift : shift + size] for size in (4096, 3 << 20, 100, 5 << 20, (17 << 20) + 8, 1, 20 << 20)]
    pieces += [memory[: 4096 * 7], memory[: 18 << 20], memoryview(bytes(memory[: 2 << 20]))]
    writer = store.write("file")
    for piece in pieces:
        writer.write(piece)
    writer.commit()
    with open(os.path.join(store.url, "file"), "rb") as file:
        assert file.read() == b"".join(pieces)


def test_a_large_aligned_piece_is_written_from_where_it_lies(store: LocalStore, monkeypatch) -> None:
    seen: list[int] = []
    write_all = direct.write_all
    monkeypatch.setattr(direct, "write_all", lambda fd, part, at: (seen.append(len(part)), write_all(fd, part, at))[1])
    memory = direct.aligned(8 << 20)
    writer = store.write("file")
    writer.write(memory[:4096])
    writer.write(memory)
    writer.commit()
    assert seen == [4096, 8 << 20, 0]
