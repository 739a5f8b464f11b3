"""Every interleaving of a few actors on one store, up to a number of preemptions: a model whose steps are the product's
own code.

An actor is a function that is given a store. It runs in a thread of its own, and only one of them runs at a time: each
store operation is a point at which another may be let on instead. All schedules with at most `preemptions` switches
away from an actor that could have gone on are tried, in depth-first order, and states that were met before are not
gone through again. Bounding preemptions, not depth, is the idea of CHESS (Musuvathi et al., "Finding and Reproducing
Heisenbugs in Concurrent Programs", OSDI 2008): protocol bugs need few.

An actor that is left waiting while the others end looks to them like one that was killed there, and when it is let on
at last like one that had been frozen; so neither needs an action of its own.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from unittest import mock

from ..digest import Bytes
from ..errors import CkptSyncError
from ..store.base import Entry, Reader, Writer
from .memory import MemoryStore

Actor = Callable[["PacedStore"], None]

NOW = 1_700_000_000.0
"""What `time.time` says throughout: time stands still, so that nothing is found out by waiting."""


class Scenario(Protocol):
    """What is explored. Made anew for each run; whatever it keeps is of that run."""

    store: MemoryStore
    """With what it holds at first."""

    actors: Mapping[str, Actor]

    def check(self) -> None:
        """Raise AssertionError if what the store holds may never be seen. Called after each change."""
        ...

    def end(self) -> None:
        """The same, of a store on which every actor is done, and of what the actors have noted down."""
        ...


class Explored(NamedTuple):
    """How much was looked at."""

    runs: int
    states: int


class Violation(AssertionError):
    """A schedule that breaks an invariant. `steps` is what was done, by whom, in order."""

    def __init__(self, cause: BaseException, steps: list[str]) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}\nafter\n  " + "\n  ".join(steps))
        self.steps = steps


class _Abandoned(BaseException):
    """Unwinds an actor whose run is of no more interest."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """A point at which one of several could go on."""

    could: tuple[str, ...]
    chosen: str
    last: str
    preemptions: int
    """So far, before this one."""


class PacedStore:
    """One actor's view of the store: it waits for its turn before each operation."""

    def __init__(self, run: _Run, name: str) -> None:
        self._run, self._name = run, name

    @property
    def url(self) -> str:
        return self._run.store.url

    def list(self, folder: str) -> Iterator[Entry]:
        with self._turn("list", folder) as note:
            found = sorted(self._run.store.list(folder))
            note(repr(found).encode())
            return iter(found)

    def open(self, path: str) -> Reader:
        with self._turn("open", path) as note:
            reader = self._run.store.open(path)
            note(self._run.store.files[path])
            return reader

    def write(self, path: str) -> Writer:
        return _PacedWriter(self._run.store.write(path), self._turn, path)

    def create(self, path: str, data: bytes) -> None:
        with self._turn("create", path):
            self._run.store.create(path, data)

    def delete(self, path: str) -> None:
        with self._turn("delete", path):
            self._run.store.delete(path)

    @contextmanager
    def _turn(self, operation: str, path: str) -> Iterator[Callable[[bytes], None]]:
        self._run.wait_for_turn(self._name, f"{operation} {path}")
        seen = [operation.encode(), path.encode()]
        try:
            yield seen.append
        except CkptSyncError as error:
            seen.append(type(error).__name__.encode())
            raise
        finally:
            self._run.has_done(self._name, seen, changes=operation not in {"list", "open"})


class _PacedWriter:
    """Only the commit is a step: what a writer holds before it is nobody else's."""

    def __init__(self, inner: Writer, turn: Callable[..., object], path: str) -> None:
        self._inner, self._turn, self._path = inner, turn, path

    def write(self, data: Bytes) -> None:
        self._inner.write(data)

    def commit(self) -> None:
        with self._turn("put", self._path):  # type: ignore[attr-defined]
            self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()


@dataclass
class _Thread:
    """An actor in its thread."""

    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    wants: str | None = ""
    """Its next operation; empty at first, None when it is done."""

    past: bytes = b""
    """A digest of all that it has seen so far, and so of all that it may do next."""

    drawn: int = 0
    """How many random names it has made."""


class _Run:
    """One schedule, from the start: the given choices first, then each goes on for as long as it can."""

    def __init__(self, scenario: Scenario, choices: tuple[str, ...]) -> None:
        self.store = scenario.store
        self.decisions: list[_Decision] = []
        self.steps: list[str] = []
        self._scenario, self._choices = scenario, choices
        self._threads = {name: _Thread() for name in scenario.actors}
        self._arrived, self._abandoned = threading.Semaphore(0), False
        self._running = ""
        self._failure: BaseException | None = None

    # -- in the actors' threads ----------------------------------------------------------------------------------

    def wait_for_turn(self, name: str, wants: str) -> None:
        me = self._threads[name]
        if not self._abandoned:
            me.wants = wants
            self._arrived.release()
            me.go.acquire()
        if self._abandoned:
            raise _Abandoned
        self.steps.append(f"{name}: {wants}")

    def has_done(self, name: str, seen: list[bytes], *, changes: bool) -> None:
        me = self._threads[name]
        me.past = hashlib.blake2b(b"\0".join([me.past, *seen]), digest_size=16).digest()
        if changes and not self._abandoned:
            self._scenario.check()

    def _act(self, name: str, actor: Actor) -> None:
        me = self._threads[name]
        try:
            self.wait_for_turn(name, "begin")
            actor(PacedStore(self, name))
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - shown with its schedule
            self._failure = self._failure or error
        me.wants = None
        self._arrived.release()

    def random_name(self) -> uuid.UUID:
        """Of the actor that runs now: the same in every run in which it comes to make as many."""
        me = self._threads[self._running]
        me.drawn += 1
        return uuid.UUID(bytes=hashlib.md5(f"{self._running} {me.drawn}".encode(), usedforsecurity=False).digest())

    # -- in the explorer's ---------------------------------------------------------------------------------------

    def go(self, met: Callable[[tuple[object, ...], int], bool]) -> None:
        """`met(state, preemptions)` says whether the state was gone through before with as few."""
        threads = [threading.Thread(target=self._act, args=item, daemon=True) for item in self._scenario.actors.items()]
        for thread in threads:
            thread.start()
            self._arrived.acquire()
        try:
            self._schedule(met)
        finally:
            self._abandoned = True
            for thread, me in zip(threads, self._threads.values(), strict=True):
                me.go.release()
                thread.join()
        if self._failure is not None:
            raise Violation(self._failure, self.steps) from self._failure

    def _schedule(self, met: Callable[[tuple[object, ...], int], bool]) -> None:
        last, used = "", 0
        while self._failure is None and (could := self._could_go_on()):
            at = len(self.decisions)
            if at >= len(self._choices) and met((last, *self._state()), used):
                return
            chosen = self._choices[at] if at < len(self._choices) else last if last in could else could[0]
            self.decisions.append(_Decision(could, chosen, last, used))
            used += last in could and chosen != last
            last = self._running = chosen
            self._threads[chosen].go.release()
            self._arrived.acquire()
        if self._failure is None:
            try:
                self._scenario.end()
            except AssertionError as error:
                self._failure = error

    def _could_go_on(self) -> tuple[str, ...]:
        return tuple(name for name, me in self._threads.items() if me.wants is not None)

    def _state(self) -> tuple[object, ...]:
        return (frozenset(self.store.files.items()), *((me.past, me.wants) for me in self._threads.values()))


def explore(scenario: Callable[[], Scenario], *, preemptions: int = 2, max_runs: int = 1_000_000) -> Explored:
    """Try every schedule. Violation for the first that breaks an invariant or in which an actor raises.

    `max_runs` is a guard against a scenario that is too large to be gone through: ValueError when it is reached, since
    what was not looked at is not known to be right.
    """
    fewest: dict[int, int] = {}

    def met(state: tuple[object, ...], used: int) -> bool:
        key = hash(state)
        if fewest.get(key, preemptions + 1) <= used:
            return True
        fewest[key] = used
        return False

    open_ends: list[tuple[str, ...]] = [()]
    runs = 0
    while open_ends:
        if (runs := runs + 1) > max_runs:
            raise ValueError(f"more than {max_runs} schedules: fewer actors, shorter ones, or fewer preemptions")
        choices = open_ends.pop()
        run = _Run(scenario(), choices)
        with _still(run):
            run.go(met)
        open_ends += _others(run.decisions, len(choices), preemptions)
    return Explored(runs, len(fewest))


def _others(decisions: list[_Decision], begin: int, preemptions: int) -> Iterator[tuple[str, ...]]:
    """The choices not taken, each with what led to it."""
    for at in range(begin, len(decisions)):
        point = decisions[at]
        for name in point.could:
            costs = point.last in point.could and name != point.last
            if name != point.chosen and point.preemptions + costs <= preemptions:
                yield (*(decision.chosen for decision in decisions[:at]), name)


@contextmanager
def _still(run: _Run) -> Iterator[None]:
    """Time stands still, and names that are random elsewhere come in the same order in every run."""
    with (
        mock.patch.object(time, "time", return_value=NOW),
        mock.patch.object(uuid, "uuid4", run.random_name),
        mock.patch.object(secrets, "token_hex", side_effect=lambda _=16: run.random_name().hex),
    ):
        yield
