"""A store on a share that needs an explicit commit by the writer and an explicit reload by the reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..digest import Bytes
from .base import Entry, Reader, Store, Writer


class HookedStore:
    """`inner`, with `flush()` (make my writes visible to others) and `refresh()` (show me theirs) called in
    order.

    flush: before a create, so that the data is there before the commit record that names it, and after it;
    also after any other file outside `data/` was written (head, receipts, leases). refresh: before every
    listing, and before opening anything outside `data/`. Files below `data/` are named by a record that was
    read after a refresh, so they need none. Errors of the hooks are raised as they are.
    """

    def __init__(self, inner: Store, *, flush: Callable[[], None], refresh: Callable[[], None]) -> None:
        self._inner = inner
        self._flush = flush
        self._refresh = refresh

    @property
    def url(self) -> str:
        return self._inner.url

    def __repr__(self) -> str:
        return f"HookedStore({self._inner!r})"

    def list(self, folder: str) -> Iterator[Entry]:
        self._refresh()
        yield from self._inner.list(folder)

    def open(self, path: str) -> Reader:
        if not _is_data(path):
            self._refresh()
        return self._inner.open(path)

    def write(self, path: str) -> Writer:
        writer = self._inner.write(path)
        return writer if _is_data(path) else _FlushingWriter(writer, self._flush)

    def create(self, path: str, data: bytes) -> None:
        self._flush()
        self._inner.create(path, data)
        self._flush()

    def delete(self, path: str) -> None:
        self._inner.delete(path)


class _FlushingWriter:
    def __init__(self, inner: Writer, flush: Callable[[], None]) -> None:
        self._inner = inner
        self._flush = flush

    def write(self, data: Bytes) -> None:
        self._inner.write(data)

    def commit(self) -> None:
        self._inner.commit()
        self._flush()

    def abort(self) -> None:
        self._inner.abort()


def _is_data(path: str) -> bool:
    return path.startswith("data/")
