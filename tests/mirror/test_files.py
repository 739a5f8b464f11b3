"""The files of one version go several at once: bounded in memory, within one rate, and none goes on after a failure."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path

import pytest

from ckptsync.digest import digest
from ckptsync.errors import BadShard
from ckptsync.manifest import FileEntry
from ckptsync.mirror import files
from ckptsync.mirror.files import FILES, IN_FLIGHT, Piece, copy
from ckptsync.mirror.throttle import Throttle
from ckptsync.store import LocalStore
from ckptsync.store.base import Reader, put_bytes, read_bytes
from ckptsync.testing.hooks import HookedStore

CHUNK = 1000
AT_MOST = FILES * IN_FLIGHT
DATA = bytes(range(250)) * 40  # ten chunks


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalStore, LocalStore]:
    monkeypatch.setattr(files, "CHUNK", CHUNK)
    return LocalStore(str(tmp_path / "source")), LocalStore(str(tmp_path / "target"))


def pieces(store: LocalStore, count: int) -> list[Piece]:
    for number in range(count):
        put_bytes(store, f"data/{number}", DATA)
    entry = FileEntry(name="shard", size=len(DATA), digest=digest(DATA, "xxh3-128"))
    return [Piece(f"data/{number}", entry) for number in range(count)]


def test_several_files_are_under_way_at_once(stores: tuple[LocalStore, LocalStore]) -> None:
    source, target = stores
    all_open = threading.Barrier(FILES)
    moved: list[int] = []
    waiting = HookedStore(source, lambda operation, _: operation == "open" and all_open.wait(60))
    copy(waiting, target, pieces(source, 2 * FILES), "xxh3-128", Throttle(None), moved.append)
    assert [read_bytes(target, f"data/{number}", 1 << 20) for number in range(2 * FILES)] == [DATA] * 2 * FILES
    assert sum(moved) == 2 * FILES * len(DATA)


class Counts:
    """A store that knows how many of its reads have been asked for and are not done with at most."""

    def __init__(self, inner: LocalStore) -> None:
        self.url, self.inner = inner.url, inner
        self.one, self.now, self.most = threading.Condition(), 0, 0

    def open(self, path: str) -> Reader:
        reader, counts = self.inner.open(path), self

        class Counted:
            size, close = reader.size, reader.close

            def readinto(self, offset: int, buffer: memoryview) -> None:
                with counts.one:
                    counts.now += 1
                    counts.most = max(counts.most, counts.now)
                    counts.one.notify_all()
                    counts.one.wait_for(lambda: counts.most > AT_MOST, 0.05)
                reader.readinto(offset, buffer)
                with counts.one:
                    counts.now -= 1

        return Counted()


@pytest.mark.parametrize("count", [1, 2 * FILES])
def test_however_many_files_the_reads_under_way_are_bounded(stores: tuple[LocalStore, LocalStore], count: int) -> None:
    source, target = stores
    asked = pieces(source, count)
    counts = Counts(source)
    copy(counts, target, asked, "xxh3-128", Throttle(None), lambda _: None)  # type: ignore[arg-type]
    assert 0 < counts.most <= AT_MOST


def test_the_failure_of_one_file_is_raised_and_ends_the_others(stores: tuple[LocalStore, LocalStore]) -> None:
    source, target = stores
    asked = pieces(source, 2 * FILES)
    put_bytes(source, "data/1", DATA[:-1] + b"?")
    with pytest.raises(BadShard, match="data/1"):
        copy(source, target, asked, "xxh3-128", Throttle(None), lambda _: None)
    there = {entry.path for entry in target.list("data")}
    assert "data/1" not in there
    assert all(read_bytes(target, path, 1 << 20) == DATA for path in there)
    assert not list(target.unfinished("data"))
    assert not [thread for thread in threading.enumerate() if "ckptsync-mirror" in thread.name]


def test_who_is_told_of_progress_may_end_it_and_is_not_told_again(stores: tuple[LocalStore, LocalStore]) -> None:
    source, target = stores
    told: list[int] = []

    def stop(count: int) -> None:
        told.append(count)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(source, target, pieces(source, 2 * FILES), "xxh3-128", Throttle(None), stop)
    assert told == [CHUNK]
    assert list(target.list("data")) == []


def test_a_rate_is_kept_on_average_and_idle_time_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    throttle = Throttle(1000.0)
    throttle.take(500)
    throttle.take(1500)
    assert now[0] == pytest.approx(102.0)
    now[0] += 60
    throttle.take(1000)
    assert now[0] == pytest.approx(163.0)


def test_several_files_share_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: Counter[str] = Counter()
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    monkeypatch.setattr("time.sleep", lambda seconds: slept.update({threading.current_thread().name: seconds}))
    throttle = Throttle(1000.0)
    threads = [threading.Thread(target=throttle.take, args=(500,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(slept.values()) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_at_a_small_rate_little_is_read_at_once(stores: tuple[LocalStore, LocalStore]) -> None:
    assert Throttle(None).piece(16 << 20) == 16 << 20
    assert Throttle(1e9).piece(16 << 20) == 16 << 20
    assert Throttle(100_000).piece(16 << 20) == 12 * 4096, "half a second's"
    assert Throttle(1).piece(16 << 20) == 4096
    source, target = stores
    told: list[int] = []
    copy(source, target, pieces(source, 1), "xxh3-128", Throttle(1e9), told.append)
    assert set(filter(None, told)) == {CHUNK}


def test_whoever_ends_a_copy_is_heard_in_the_middle_of_a_long_sleep(stores: tuple[LocalStore, LocalStore]) -> None:
    source, target = stores
    naps = itertools.count()

    def stop(count: int) -> None:
        if count == 0 and next(naps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(source, target, pieces(source, FILES), "xxh3-128", Throttle(0.001), stop)  # a piece in eleven days
    assert list(target.list("data")) == []
    assert not [thread for thread in threading.enumerate() if "ckptsync-mirror" in thread.name]
