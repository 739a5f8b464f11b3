"""Stores that misbehave on purpose, around a real one: for every test that asks what a bad moment leaves
behind.

`HookedStore` calls a hook before each operation, and another one after it: `(operation, path)`, the operation
being one of OPERATIONS. A hook may raise, sleep, or kill the process; what it raises is what the caller sees,
so an error from `after` is a lost answer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from ..digest import Bytes
from ..store.base import Entry, Reader, Store, Writer

OPERATIONS = ("list", "open", "write", "append", "commit", "abort", "create", "delete")
"""`write` opens a writer; `append`, `commit` and `abort` are what is done with it."""

CHANGES = ("write", "append", "commit", "create", "delete")
"""The operations that may leave something behind."""

Hook = Callable[[str, str], None]


class HookedStore:
    """A store that asks `before` and `after` around each operation."""

    def __init__(self, store: Store, before: Hook = lambda *_: None, *, after: Hook = lambda *_: None) -> None:
        self.inner, self._before, self._after = store, before, after

    @property
    def url(self) -> str:
        return self.inner.url

    @contextmanager
    def _around(self, operation: str, path: str) -> Iterator[None]:
        self._before(operation, path)
        yield
        self._after(operation, path)

    def list(self, folder: str) -> Iterator[Entry]:
        with self._around("list", folder):
            return self.inner.list(folder)

    def open(self, path: str) -> Reader:
        with self._around("open", path):
            return self.inner.open(path)

    def write(self, path: str) -> Writer:
        with self._around("write", path):
            return _HookedWriter(self.inner.write(path), path, self._around)

    def create(self, path: str, data: bytes) -> None:
        with self._around("create", path):
            self.inner.create(path, data)

    def delete(self, path: str) -> None:
        with self._around("delete", path):
            self.inner.delete(path)


@dataclass
class _HookedWriter:
    inner: Writer
    path: str
    around: Callable[[str, str], AbstractContextManager[None]]

    def write(self, data: Bytes) -> None:
        with self.around("append", self.path):
            self.inner.write(data)

    def commit(self) -> None:
        with self.around("commit", self.path):
            self.inner.commit()

    def abort(self) -> None:
        with self.around("abort", self.path):
            self.inner.abort()


@dataclass
class Recorder:
    """Hook: remembers every operation."""

    seen: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, operation: str, path: str) -> None:
        self.seen.append((operation, path))

    def changes(self) -> list[tuple[str, str]]:
        return [(operation, path) for operation, path in self.seen if operation in CHANGES]


@dataclass
class Failing:
    """Hook: raises a fresh `error()` at each operation that `when(operation, path)` picks, `times` times at
    most."""

    error: Callable[[], BaseException]
    when: Callable[[str, str], bool]
    times: int = 1 << 30

    def __call__(self, operation: str, path: str) -> None:
        if self.times and self.when(operation, path):
            self.times -= 1
            raise self.error()


@dataclass
class Crashing:
    """Hook: kills this process with SIGKILL before its `at`-th changing operation, counted from 0. `crashes` has a
    harness for it.

    Run it once with `at=None` in a process that lives to learn how many there are (`count`).
    """

    at: int | None
    count: int = 0
    just_before: Callable[[], object] | None = None
    """Called right before the kill."""

    def __call__(self, operation: str, _path: str) -> None:
        if operation not in CHANGES:
            return
        if self.count == self.at:
            if self.just_before is not None:
                self.just_before()
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def matching(*operations: str, suffix: str = "", part: str = "") -> Callable[[str, str], bool]:
    """A picker for Failing: any of `operations` on a path that ends in `suffix` and holds `part`."""
    return lambda operation, path: operation in operations and path.endswith(suffix) and part in path
