"""What a store is: bytes behind a URL, five verbs, and nothing about versions.

Paths are `str`, relative to the store's root, with `/` between the parts and never `..`. They are not
`pathlib.Path`, which folds the double slash of a URL and brings in the local separator.

What every store guarantees, and all that the commit rule builds on:

- a `Writer`'s file is invisible under its name until `commit`, and whole and durable after it;
- `create` is create-if-absent: of two callers one succeeds and the other gets AlreadyExists (where the storage
  enforces it: `probe.enforces_create` asks at start-up);
- `list` and `open` see what others committed, without any cache of ours in between;
- every failure is one of ckptsync.errors (StoreUnavailable after bounded retries, StoreFull, StoreDenied,
  NotFound, AlreadyExists), with the store's own error as its cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from ..digest import Bytes
from ..errors import BadManifest, InvalidInput


class Entry(NamedTuple):
    """One file in a listing. `modified` (seconds, the store's clock) is for grace periods only, never for order."""

    path: str
    size: int
    modified: float


class Reader(Protocol):
    """An open file. `readinto` may be called by several threads at once."""

    @property
    def size(self) -> int: ...

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole of `buffer` from `offset`. A file that ends before is BadShard; else a StoreError."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Derived(Protocol):
    """A Reader of a file that no store has, since it is made while it is read."""

    @property
    def made_from(self) -> str:
        """Out of what, for errors about its bytes: a whole sentence after "which"."""
        ...


def made_from(reader: Reader) -> str:
    """To put behind an error about bytes that are not right: where the fault lies if the file is made from others."""
    return f", which {reader.made_from}" if isinstance(reader, Derived) else ""


class Writer(Protocol):
    """A file in the making. Data goes in order; exactly one of `commit` and `abort` ends it."""

    def write(self, data: Bytes) -> None:
        """Take all of `data`; it may be reused by the caller as soon as this returns."""
        ...

    def commit(self) -> None:
        """Make the file durable, then visible under its name, replacing what was there."""
        ...

    def abort(self) -> None:
        """Leave no trace under the name; never raises."""
        ...


class Store(Protocol):
    """Five verbs. Implementations: `local.LocalStore`, `remote.RemoteStore`; a test may write its own in a page."""

    @property
    def url(self) -> str: ...

    def list(self, folder: str) -> Iterator[Entry]:
        """Every file below `folder`, at any depth, in no order. A folder that is not there is empty.

        Temporary files of writers do not appear. Only true absence counts as empty: EACCES or EIO raise, since
        "could not look" taken for "nothing there" has destroyed checkpoints.
        """
        ...

    def open(self, path: str) -> Reader:
        """Open for reading. NotFound if absent. Symbolic links below the root are refused (StoreDenied)."""
        ...

    def write(self, path: str) -> Writer:
        """Start a file of any size; folders are made as needed."""
        ...

    def create(self, path: str, data: bytes) -> None:
        """Create-if-absent of one small, non-empty file, whole and durable. AlreadyExists if the name is taken.

        AlreadyExists may also mean that an earlier try of ours landed and its answer was lost: the caller reads
        the file back and compares a nonce.
        """
        ...

    def delete(self, path: str) -> None:
        """Delete one file; absence is success."""
        ...


def read_bytes(store: Store, path: str, limit: int) -> bytes:
    """A small file, whole. NotFound if absent, BadManifest if it is larger than `limit` bytes."""
    reader = store.open(path)
    try:
        if reader.size > limit:
            raise BadManifest(f"{path} has {reader.size} bytes, more than {limit}: refused before reading")
        data = bytearray(reader.size)
        if data:
            reader.readinto(0, memoryview(data))
        return bytes(data)
    finally:
        reader.close()


def refuse_empty(path: str, data: bytes) -> None:
    """What every `create` asks first. InvalidInput for no bytes."""
    if not data:
        raise InvalidInput(f"{path}: an empty file says nothing, and some stores lose the race for it")


def put_bytes(store: Store, path: str, data: bytes) -> None:
    """Write one small file, replacing what was there."""
    writer = store.write(path)
    try:
        writer.write(data)
        writer.commit()
    except BaseException:
        writer.abort()
        raise
