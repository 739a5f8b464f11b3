"""Several watchers on one host, each a process of its own, as engines are."""

from __future__ import annotations

import multiprocessing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Semaphore
from typing import NamedTuple

from ckptsync.store.base import Reader
from ckptsync.testing.engines import FakeEngine
from watchers.health import Health
from watchers.watcher import Watcher

from .actions import weights
from .conftest import CountingStore
from .publish import SCHEMA, TestPublisher

WATCHERS = 8


class Watched(NamedTuple):
    """What one process did."""

    reader: str
    read: int
    label: str
    weights: str


class PatientStore(CountingStore):
    """Opens no data file before every watcher of the host has come to stage the version."""

    def __init__(self, root: str, arrived: Semaphore) -> None:
        super().__init__(root)
        self._arrived, self._missing = arrived, WATCHERS

    def open(self, path: str) -> Reader:
        while path.startswith("data/") and self._missing:
            assert self._arrived.acquire(timeout=60)
            self._missing -= 1
        return super().open(path)


def watch_once(root: str, stage: str, reader: str, arrived: Semaphore, results: Queue[Watched]) -> None:
    def changed(health: Health) -> None:
        if health.state == "staging":
            arrived.release()

    store, engine = PatientStore(root, arrived), FakeEngine(SCHEMA)
    watcher = Watcher(store, engine, stage=stage, reader=reader, events=False, on_change=changed)
    watcher.step()
    results.put(Watched(reader, store.read, engine.label, engine.weights))
    watcher.close()


def test_eight_watchers_on_one_host_read_the_store_once(root: str, publisher: TestPublisher, folder: str) -> None:
    manifest = publisher.publish()
    spawn = multiprocessing.get_context("spawn")
    arrived, results = spawn.Semaphore(0), spawn.Queue()
    arguments = [(root, folder, f"engine-{n}", arrived, results) for n in range(WATCHERS)]
    processes = [spawn.Process(target=watch_once, args=each) for each in arguments]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(60)
    assert sorted(each.reader for each in found) == [f"engine-{n}" for n in range(WATCHERS)]
    assert {(each.label, each.weights) for each in found} == {("e1-v1", weights(root, manifest))}
    assert sorted(each.read for each in found) == [0] * (WATCHERS - 1) + [manifest.nbytes]
