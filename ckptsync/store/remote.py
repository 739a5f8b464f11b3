"""A store behind fsspec: object stores other than S3 (see s3.py), and memory:// for tests in one process.

Listing caches are off and the instance is ours alone: fsspec caches both for ever by default, and then misses
what others wrote. The client is made on first use in each process, since clients do not survive a fork.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import fsspec

from ..digest import Bytes
from ..errors import AlreadyExists, BadShard, InvalidInput, NotFound
from .base import Entry, Reader, Writer, refuse_empty
from .paths import parts_of
from .retry import retrying, translated
from .views import target

# Those whose create-if-absent is a condition that the server checks. fsspec's fallback for all others looks
# first and writes then, which two writers pass together.
_EXTRAS = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs",
    "abfss": "adlfs", "memory": "fsspec",
}  # fmt: skip

_RANGE = 32 << 20
_fsspec: Any = fsspec  # it is not typed
_memory_lock = threading.Lock()


class RemoteStore:
    """An fsspec filesystem as a store. `deadline` (seconds) bounds retries; `options` are its own."""

    def __init__(self, url: str, *, deadline: float = 30.0, **options: Any) -> None:
        protocol = url.partition("://")[0]
        if protocol not in _EXTRAS:
            known = ", ".join(f"{name}://" for name in _EXTRAS)
            raise InvalidInput(f"{protocol}:// is not a store that creates if absent; use a folder or {known}")
        try:
            _fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise InvalidInput(f"{protocol}:// is not installed: pip install {_EXTRAS[protocol]}") from error
        self.url = _without_password(url.rstrip("/"))
        self.deadline = deadline
        self._given_url = url
        self._protocol = protocol
        self._options = {**options, "use_listings_cache": False, "skip_instance_cache": True}
        self._clients: dict[int, tuple[Any, str]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def list(self, folder: str = "") -> Iterator[Entry]:
        """See Store.list. Object stores have no folders: an absent one is just no keys."""
        prefix = "/".join(parts_of(folder)) if folder else ""
        _, root = self._client()
        found = retrying(self._say("list", prefix), lambda: self._find(prefix), deadline=self.deadline)
        for name, info in found.items():
            path = name.removeprefix(root).lstrip("/")
            if info["type"] == "file" and path.startswith(f"{prefix}/" if prefix else ""):
                yield Entry(path, int(info["size"]), _modified(info))

    def open(self, path: str) -> Reader:
        """See Store.open."""
        return RemoteReader(self, path)

    def write(self, path: str) -> Writer:
        """See Store.write. An upload that is not committed leaves nothing that a listing shows."""
        parts_of(path)
        return _MemoryWriter(self, path) if self._protocol == "memory" else RemoteWriter(self, path)

    def create(self, path: str, data: bytes) -> None:
        """See Store.create. A condition on the put; for memory:// a lock, for the threads of a process."""
        refuse_empty(path, data)
        action = self._say("create", path)
        retrying(action, lambda: self._create(path, data), deadline=self.deadline)

    def delete(self, path: str) -> None:
        """See Store.delete."""
        fs, where = self._locate(path)
        with contextlib.suppress(NotFound):
            retrying(self._say("delete", path), lambda: fs.rm_file(where), deadline=self.deadline)

    def close(self) -> None:
        """Close this process's connections, which also happens when the store is collected. Use opens new ones."""
        self._clients.pop(os.getpid(), None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}  # another process makes its own

    def _create(self, path: str, data: bytes) -> None:
        fs, where = self._locate(path)
        if self._protocol != "memory":
            fs.pipe_file(where, data, mode="create")
            return
        with _memory_lock:
            if fs.exists(where):
                raise AlreadyExists(self._say("create", path))
            fs.pipe_file(where, data)

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        fs, root = self._client()
        try:
            found: dict[str, dict[str, Any]] = fs.find(f"{root}/{prefix}" if prefix else root, detail=True)
        except FileNotFoundError:
            return {}
        return found

    def _say(self, verb: str, path: str) -> str:
        return f"{verb} {self.url}/{path}"

    def _client(self) -> tuple[Any, str]:
        """This process's filesystem and the root in it. Those of a parent process are kept, not closed."""
        if os.getpid() not in self._clients:
            made = translated(self._say("open", ""), self._connect)
            self._clients.setdefault(os.getpid(), made)
        return self._clients[os.getpid()]

    def _connect(self) -> tuple[Any, str]:
        fs, root = _fsspec.core.url_to_fs(self._given_url, **self._options)
        return fs, root.rstrip("/")

    def _locate(self, path: str) -> tuple[Any, str]:
        fs, root = self._client()
        return fs, f"{root}/{'/'.join(parts_of(path))}"


class RemoteReader:
    """See Reader. Each read is ranges of at most 32 MiB, retried on their own."""

    def __init__(self, store: RemoteStore, path: str) -> None:
        self._fs, self._where = store._locate(path)  # holds the connections open
        self._action = store._say("read", path)
        self._deadline = store.deadline
        info = retrying(self._action, lambda: self._fs.info(self._where), deadline=self._deadline)
        if info["type"] != "file":
            raise NotFound(f"{self._action}: a folder is there, not a file")
        self._size = int(info["size"])

    @property
    def size(self) -> int:
        return self._size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See Reader.readinto."""
        view = target(self._action, offset, buffer, self.size)
        for start in range(0, len(view), _RANGE):
            self._fill(offset + start, view[start : start + _RANGE])

    def close(self) -> None:
        """Nothing is held open."""

    def _fill(self, offset: int, view: memoryview) -> None:
        end = offset + len(view)
        data = retrying(
            self._action,
            lambda: self._fs.cat_file(self._where, start=offset, end=end),
            deadline=self._deadline,
        )
        if len(data) != len(view):
            raise BadShard(f"{self._action}: {len(data)} of the {len(view)} bytes from {offset}")
        view[:] = data


class RemoteWriter:
    """See Writer. fsspec's own upload in parts, which completes on close; retries are the filesystem's."""

    def __init__(self, store: RemoteStore, path: str, *, part_size: int = 16 << 20) -> None:
        fs, where = store._locate(path)
        self._action = store._say("write", path)
        self._file = translated(self._action, lambda: fs.open(where, "wb", block_size=part_size))

    def write(self, data: Bytes) -> None:
        """See Writer.write."""
        translated(self._action, lambda: self._file.write(data))

    def commit(self) -> None:
        """See Writer.commit."""
        translated(self._action, self._file.close)

    def abort(self) -> None:
        """See Writer.abort. Marked as closed, since close, also when collected, completes the upload."""
        if not self._file.closed:
            self._file.closed = True
            with contextlib.suppress(Exception):
                self._file.discard()


class _MemoryWriter:
    """memory:// shows a file as soon as it is opened for writing, so the bytes wait here."""

    def __init__(self, store: RemoteStore, path: str) -> None:
        self._fs, self._where = store._locate(path)
        self._data = bytearray()

    def write(self, data: Bytes) -> None:
        self._data += data

    def commit(self) -> None:
        self._fs.pipe_file(self._where, bytes(self._data))

    def abort(self) -> None:
        self._data.clear()


def _modified(info: dict[str, Any]) -> float:
    """Seconds. The name of the field and its type differ by filesystem."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, str):
            return datetime.datetime.fromisoformat(value).timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


def _without_password(url: str) -> str:
    split = urlsplit(url)
    return url.replace(f":{split.password}@", "@", 1) if split.password else url
