"""A folder as a store: what is made with which mode, what is durable when, and what is read past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib

import pytest

from ckptsync.errors import (
    NotFound,
    StoreDenied,
    StoreError,
)
from ckptsync.store import LocalStore, direct, open_store, put_bytes, read_bytes

from .folders import failing, files_on_disk, names

CHUNK = direct.CHUNK


@pytest.fixture
def store(tmp_path: pathlib.Path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"), deadline=0.2)


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


@pytest.mark.timeout(120)
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
    monkeypatch.setattr(direct, "in_memory", lambda _: False)  # the folder of tests may be
    real, seen = os.pwrite, {}

    def recording(fd: int, data: memoryview, offset: int) -> int:
        seen[offset] = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", recording)
    put_bytes(store, "large", bytes(2 * CHUNK + 1))
    assert seen == {0: True, CHUNK: True, 2 * CHUNK: False}
    put_bytes(LocalStore(store.url, direct=False), "cached", bytes(2 * CHUNK + 1))
    assert seen == {0: False, CHUNK: False, 2 * CHUNK: False}


def test_into_memory_large_pieces_are_written_from_where_they_lie(store: LocalStore, monkeypatch) -> None:
    monkeypatch.setattr(direct, "in_memory", lambda _: True)
    real, seen = os.pwrite, {}

    def recording(fd: int, data: memoryview, offset: int) -> int:
        seen[offset] = direct.address(data), len(data)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", recording)
    large = memoryview(bytearray(os.urandom((2 << 20) + 64)))[1:]  # at an odd address
    writer = store.write("shard.bin")
    writer.write(b"header")
    writer.write(large)
    writer.commit()
    assert seen[len(b"header")] == (direct.address(large), 2 << 20)
    assert pathlib.Path(store.url, "shard.bin").read_bytes() == b"header" + large


def test_the_kernels_tmpfs_is_memory_and_other_file_systems_are_not() -> None:
    for folder, memory in (("/dev/shm", True), ("/proc", False), ("/sys", False)):
        handle = os.open(folder, os.O_RDONLY)
        assert direct.in_memory(handle) is memory
        os.close(handle)


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


def test_large_buffers_are_asked_for_in_huge_pages() -> None:
    """Touching them for the first time costs more than writing them where they are not."""
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("this kernel has no transparent huge pages")
    buffer = direct.aligned(4 << 20)
    at = direct.address(buffer)
    with open("/proc/self/smaps") as file:
        flags, inside = "", False
        for line in file:
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                inside = begin <= at < end
            elif inside and line.startswith("VmFlags:"):
                flags = line
    assert " hg" in flags
