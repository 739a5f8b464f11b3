from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ckptsync.store import LocalStore
from ckptsync.store.base import Reader
from ckptsync.testing.engines import FakeEngine
from ckptsync.testing.hooks import HookedStore
from watchers.watcher import Watcher

from .publish import SCHEMA, TestPublisher


@pytest.fixture
def root(tmp_path: Any) -> str:
    return str(tmp_path / "root")


@pytest.fixture
def publisher(root: str) -> TestPublisher:
    return TestPublisher(root)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(SCHEMA)


@pytest.fixture
def folder(tmp_path: Any) -> str:
    """The stage's folder."""
    return str(tmp_path / "stage")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file of a few hundred bytes comes in many ranges."""
    monkeypatch.setattr("watchers.fetch.CHUNK", 100)


@pytest.fixture
def watch(root: str, tmp_path: Any) -> Iterator[Callable[..., Watcher]]:
    """Make a watcher on the root, with a stage of its own unless told otherwise."""
    made: list[Watcher] = []

    def make(engine: Any, **options: Any) -> Watcher:
        where = options.pop("root", root)
        defaults = {
            "stage": str(tmp_path / "stage"),
            "reader": f"reader-{len(made)}",
            "poll": 0.01,
            "events": False,
        }
        made.append(Watcher(where, engine, **{**defaults, **options}))
        return made[-1]

    yield make
    for watcher in made:
        watcher.close()


@dataclass
class CountingStore(HookedStore):
    """A local store that counts the bytes read from data files."""

    root: str
    read: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        super().__init__(LocalStore(self.root), lambda operation, path: None)

    def open(self, path: str) -> Reader:
        reader = super().open(path)
        return _CountingReader(reader, self) if path.startswith("data/") else reader


@dataclass
class _CountingReader:
    inner: Reader
    store: CountingStore

    @property
    def size(self) -> int:
        return self.inner.size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self.inner.readinto(offset, buffer)
        with self.store.lock:
            self.store.read += len(buffer)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def counting_store(root: str) -> CountingStore:
    return CountingStore(root)


def staged_folders(stage: str) -> list[str]:
    """Names of the version folders in a stage, of its only channel."""
    (channel,) = [name for name in os.listdir(stage) if not name.startswith(".")]
    return sorted(name for name in os.listdir(os.path.join(stage, channel)) if not name.startswith("."))
