"""A store in a dictionary: as strict as a local folder, with no time of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..digest import Bytes
from ..errors import AlreadyExists, BadShard, NotFound
from ..store.base import Entry, Reader, Writer, refuse_empty
from ..store.paths import parts_of


class MemoryStore:
    """Every verb takes effect at once and whole; `files` may be looked at and changed by a test.

    It tells no times (`Entry.modified` is 0), as some object stores do not, so nothing in it ever gets old.
    """

    url = "memory://"

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        self.files = dict(files or {})

    def list(self, folder: str) -> Iterator[Entry]:
        below = f"{folder}/" if folder else ""
        return iter([Entry(path, len(data), 0.0) for path, data in self.files.items() if path.startswith(below)])

    def open(self, path: str) -> Reader:
        parts_of(path)
        if path not in self.files:
            raise NotFound(f"{path} is not there")
        return _MemoryReader(path, self.files[path])

    def write(self, path: str) -> Writer:
        parts_of(path)
        return _MemoryWriter(self, path)

    def create(self, path: str, data: bytes) -> None:
        parts_of(path)
        refuse_empty(path, data)
        if path in self.files:
            raise AlreadyExists(f"{path} is taken")
        self.files[path] = data

    def delete(self, path: str) -> None:
        parts_of(path)
        self.files.pop(path, None)


class _MemoryReader:
    def __init__(self, path: str, data: bytes) -> None:
        self._path, self._data = path, data

    @property
    def size(self) -> int:
        return len(self._data)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        part = self._data[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise BadShard(f"{self._path} ends at {len(self._data)}")
        buffer[:] = part

    def close(self) -> None: ...


class _MemoryWriter:
    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store, self._path, self._data = store, path, bytearray()

    def write(self, data: Bytes) -> None:
        self._data += data

    def commit(self) -> None:
        self._store.files[self._path] = bytes(self._data)

    def abort(self) -> None: ...
