"""What an action asks of its store, counted: exact, and the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ..digest import Bytes
from ..store.base import Entry, Reader, Store, Writer

PAGE = 1000
"""Entries in one answer to a listing, as S3, GCS and Azure page them."""


@dataclass(slots=True)
class Counts:
    """Requests as an object store would be asked, and bytes. A file that is read whole is one `get`."""

    lists: int = 0
    """Pages: a listing of 2,500 files is three."""

    gets: int = 0
    puts: int = 0
    deletes: int = 0
    read: int = 0
    written: int = 0

    @property
    def requests(self) -> int:
        return self.lists + self.gets + self.puts + self.deletes

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class CountingStore:
    """`inner`, with `counts` of all that was asked of it."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.counts = inner, Counts()

    @property
    def url(self) -> str:
        return self.inner.url

    def list(self, folder: str) -> Iterator[Entry]:
        self.counts.lists += 1
        for number, entry in enumerate(self.inner.list(folder)):
            self.counts.lists += number > 0 and number % PAGE == 0
            yield entry

    def open(self, path: str) -> Reader:
        self.counts.gets += 1
        return _Reader(self.inner.open(path), self.counts)

    def write(self, path: str) -> Writer:
        return _Writer(self.inner.write(path), self.counts)

    def create(self, path: str, data: bytes) -> None:
        self.counts.puts += 1
        self.counts.written += len(data)
        self.inner.create(path, data)

    def delete(self, path: str) -> None:
        self.counts.deletes += 1
        self.inner.delete(path)


class _Reader:
    def __init__(self, inner: Reader, counts: Counts) -> None:
        self._inner, self._counts = inner, counts
        self.close = inner.close

    @property
    def size(self) -> int:
        return self._inner.size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._counts.read += buffer.nbytes
        self._inner.readinto(offset, buffer)


class _Writer:
    def __init__(self, inner: Writer, counts: Counts) -> None:
        self._inner, self._counts = inner, counts
        self.abort = inner.abort

    def write(self, data: Bytes) -> None:
        self._counts.written += memoryview(data).nbytes
        self._inner.write(data)

    def commit(self) -> None:
        self._counts.puts += 1
        self._inner.commit()
