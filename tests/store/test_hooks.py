"""Case 56: shares that need an explicit commit by the writer and an explicit reload by the reader."""

from __future__ import annotations

import pathlib

import pytest

from ckptsync.errors import AlreadyExists
from ckptsync.store import HookedStore, LocalStore, enforces_create, put_bytes, read_bytes


class Share:
    """Two clients of a share, each with its own view; `flush` sends mine, `refresh` fetches theirs."""

    def __init__(self, tmp_path: pathlib.Path) -> None:
        self.shared = LocalStore(str(tmp_path / "shared"))
        self.writer_view = LocalStore(str(tmp_path / "writer"))
        self.reader_view = LocalStore(str(tmp_path / "reader"))
        self.calls: list[str] = []
        self.writer = HookedStore(
            Logged(self.writer_view, self.calls),
            flush=self.flush,
            refresh=lambda: self.calls.append("refresh"),
        )
        self.reader = HookedStore(Logged(self.reader_view, self.calls), flush=lambda: None, refresh=self.refresh)

    def flush(self) -> None:
        self.calls.append("flush")
        copy(self.writer_view, self.shared)

    def refresh(self) -> None:
        self.calls.append("refresh")
        copy(self.shared, self.reader_view)


class Logged(LocalStore):
    def __init__(self, inner: LocalStore, calls: list[str]) -> None:
        super().__init__(inner.url)
        self._calls = calls

    def create(self, path: str, data: bytes) -> None:
        self._calls.append(f"create {path}")
        super().create(path, data)

    def open(self, path: str):
        self._calls.append(f"open {path}")
        return super().open(path)

    def list(self, folder: str = ""):
        self._calls.append(f"list {folder}")
        return super().list(folder)


def copy(source: LocalStore, target: LocalStore) -> None:
    for entry in list(source.list("")):
        put_bytes(target, entry.path, read_bytes(source, entry.path, 1 << 20))


@pytest.fixture
def share(tmp_path: pathlib.Path) -> Share:
    return Share(tmp_path)


def test_case_56_a_reader_sees_the_manifest_and_the_data_that_it_names(share: Share) -> None:
    put_bytes(share.writer, "data/v1/shard.bin", b"weights")
    share.writer.create("manifests/v1.json", b"{}")
    assert [entry.path for entry in share.reader.list("manifests")] == ["manifests/v1.json"]
    assert read_bytes(share.reader, "data/v1/shard.bin", 100) == b"weights"


def test_case_56_data_is_flushed_before_the_record_and_the_record_after(share: Share) -> None:
    put_bytes(share.writer, "data/v1/shard.bin", b"weights")
    share.writer.create("manifests/v1.json", b"{}")
    assert share.calls == ["flush", "create manifests/v1.json", "flush"]


def test_case_56_the_reader_refreshes_before_it_looks(share: Share) -> None:
    put_bytes(share.writer, "head.json", b"1")
    put_bytes(share.writer, "data/v1/shard.bin", b"x")
    share.flush()
    share.calls.clear()
    list(share.reader.list("manifests"))
    share.reader.open("head.json").close()
    share.reader.open("data/v1/shard.bin").close()
    assert share.calls == ["refresh", "list manifests", "refresh", "open head.json", "open data/v1/shard.bin"]


def test_case_56_receipts_and_the_head_are_flushed_when_written(share: Share) -> None:
    put_bytes(share.writer, "head.json", b"1")
    assert share.calls == ["flush"]
    assert read_bytes(share.reader, "head.json", 10) == b"1"


def test_case_56_a_lost_race_and_an_abort_come_through(share: Share) -> None:
    share.writer.create("manifests/v1.json", b"{}")
    with pytest.raises(AlreadyExists):
        share.writer.create("manifests/v1.json", b"{}")
    writer = share.writer.write("head.json")
    writer.write(b"x")
    writer.abort()
    share.writer.delete("manifests/v1.json")
    assert list(share.writer.list("")) == []
    assert enforces_create(share.writer)


class Careless(LocalStore):
    """Like an S3 server that ignores the condition and answers 200."""

    def create(self, path: str, data: bytes) -> None:
        put_bytes(self, path, data)


def test_the_probe_catches_a_store_that_ignores_the_condition(tmp_path: pathlib.Path) -> None:
    store = Careless(str(tmp_path))
    assert not enforces_create(store)
    assert list(store.list("")) == []


class ForgetfulNetwork(LocalStore):
    """Its first create lands, its answer is lost, and the retry meets its own file."""

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        raise AlreadyExists(path)


def test_the_probe_takes_a_refusal_of_its_own_retry_for_enforcement(tmp_path: pathlib.Path) -> None:
    assert enforces_create(ForgetfulNetwork(str(tmp_path)))
