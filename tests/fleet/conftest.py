from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptsync.engine import StagedVersion
from ckptsync.testing.engines import Failing, FakeEngine
from tests.watcher.publish import SCHEMA, TestPublisher
from watchers.fleet import Fleet
from watchers.health import Receipt
from watchers.roster import Roster


class Listed:
    """A source whose engines the test changes."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.listed = list(urls)

    def urls(self) -> Sequence[str]:
        return list(self.listed)


class Hanging(Failing):
    """Its load of `only` does not end before `let_go` is set."""

    def __init__(self, only: str) -> None:
        super().__init__(SCHEMA)
        self.only, self.let_go, self.hangs = only, threading.Event(), threading.Event()

    def update(self, version: StagedVersion) -> None:
        if version.label == self.only:
            self.hangs.set()
            assert self.let_go.wait(60)
        super().update(version)


class Replicas:
    """A fleet of fakes that runs in a thread, and what it said."""

    def __init__(self, root: str, engines: dict[str, FakeEngine], **options: Any) -> None:
        self.engines, self.source, self.receipts = engines, Listed(list(engines)), list[Receipt]()
        defaults = {"poll": 0.02, "events": False, "reader": "fleet"}
        self.fleet = Fleet(
            options.pop("store", root),
            Roster([self.source]),
            self._connect,
            on_receipt=self.receipts.append,
            **{**defaults, **options},
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.fleet.run, args=(self._stop,))

    def _connect(self, url: str) -> FakeEngine:
        self.engines[url].called = url
        return self.engines[url]

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        for engine in self.engines.values():
            if isinstance(engine, Hanging):
                engine.let_go.set()
        self._stop.set()
        self._thread.join(30)
        self.fleet.close()
        assert not self._thread.is_alive()

    def labels(self) -> dict[str, str]:
        """What each engine serves."""
        return {name: engine.label for name, engine in self.engines.items() if not engine.paused}

    def serve(self, label: str, *names: str) -> bool:
        found = self.fleet.members()
        return all(
            self.labels().get(name) == label and name in found and found[name].ready and found[name].version == label
            for name in names or self.engines
        )


@pytest.fixture(autouse=True)
def claims_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines `a` and `b` are those of one test, and not of every test run on this host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


@pytest.fixture
def publisher(root: str) -> TestPublisher:
    return TestPublisher(root)


@pytest.fixture
def replicas(root: str, tmp_path: Path) -> Iterator[Callable[..., Replicas]]:
    """`replicas(a=FakeEngine(...), b=...)` runs a fleet of them; options of Fleet go in `options`."""
    made: list[Replicas] = []

    def make(options: dict[str, Any] | None = None, **engines: FakeEngine) -> Replicas:
        options = {"stage": str(tmp_path / f"stage-{len(made)}"), **(options or {})}
        made.append(Replicas(root, engines, **options))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close()


def fakes(*names: str) -> dict[str, FakeEngine]:
    return {name: Failing(SCHEMA) for name in names}
