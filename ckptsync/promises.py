"""What a storage promises between two of its clients, found out by two processes: `ckptsync doctor ROOT --full`.

Each check names a promise that ckptsync builds on, or a delay that settings can live with, and says which. The second
process runs here, or on another host (`hosts=2`), where its clock is first compared with ours.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext

from .doctor import Check
from .peer import RACE_GAP, Conversation, Question, race
from .store.base import Store, put_bytes
from .store.local import LocalStore
from .store.probe import deleted_after
from .trials import TRIALS, drop_folder

RACES = 40
OVERWRITES, OVERWRITTEN_BYTES = 12, 4 << 20
SAMPLES = 5
SLOW = 1.0
"""Seconds of delay between clients from which on a setting should follow."""


def examine_promises(
    root: str, store: Store, *, hosts: int = 1, only: Collection[str] | None = None
) -> Iterator[Check]:
    """One check for each promise, or for some, by their names in `PROMISES`. Conflict if the second process does not
    answer; leaves no file behind.

    With `hosts=2` somebody is to run `ckptsync doctor ROOT --peer` on another host within ten minutes.
    """
    try:
        with _session(root, store, hosts) as talk:
            pair = _Pair(talk, 0.0 if hosts == 1 else None)
            for name, check in PROMISES.items():
                if only is None or name in only:
                    yield check(pair)
        if only is None:
            yield _durable(store)
            if isinstance(store, LocalStore):
                yield _against_raw(store)
    finally:
        drop_folder(store)


class _Pair:
    """The two processes, with the difference of their clocks."""

    def __init__(self, talk: Conversation, offset: float | None) -> None:
        self.talk, self.store, self.folder = talk, talk.store, f"{talk.folder}/files"
        self.offset = offset if offset is not None else self._offset()
        """Seconds by which the other clock is ahead; off by half a round trip at most."""

    def delay(self, what: str, act: Callable[[str], object], *, before: bytes = b"", seconds: float = 30.0) -> float:
        """Seconds from the end of `act(path)` until the other process sees it; infinite if it never did."""
        path = f"{self.folder}/{what}-{uuid.uuid4().hex}"
        if before:
            put_bytes(self.store, path, before)
        number = self.talk.ask(Question(what=what, path=path, seconds=seconds))
        act(path)
        done = time.time()
        at = self.talk.answer(number, seconds).at
        return max(0.0, at - self.offset - done) if at else float("inf")

    def median_delay(self, what: str, act: Callable[[str], object], *, before: bytes = b"") -> float:
        return statistics.median(self.delay(what, act, before=before) for _ in range(SAMPLES))

    def _offset(self) -> float:
        trips = []
        for _ in range(SAMPLES):
            asked = time.time()
            answer = self.talk.answer(self.talk.ask(Question(what="time")), 30.0)
            heard = time.time()
            trips.append((heard - asked, answer.at - (asked + heard) / 2))
        return min(trips)[1]


def _create(pair: _Pair) -> Check:
    """Both create the same names at the same moments."""
    begin = time.time() + 1.0
    path = f"{pair.folder}/race"
    mine = Question(what="race", path=path, begin=begin, count=RACES)
    theirs = Question(what="race", path=path, begin=begin + pair.offset, count=RACES)
    number = pair.talk.ask(theirs)
    won = set(race(pair.store, mine, lambda: None).counts)
    other = set(pair.talk.answer(number, 1.0 + RACES * RACE_GAP).counts)
    twice, nobody = len(won & other), RACES - len(won | other)
    detail = f"{RACES} races: {len(won)} won here, {len(other)} there, {twice} by both, {nobody} by nobody"
    if twice:
        return Check(
            "create-if-absent between clients", "warn", detail,
            "one publisher at a time: a second is found out at its commit, not kept out",
        )  # fmt: skip
    return Check("create-if-absent between clients", "ok", detail)


def _named(pair: _Pair) -> Check:
    delay = pair.median_delay("found", lambda path: put_bytes(pair.store, path, b"here"))
    return _delayed(
        "a name that was looked for too early", delay, "is found",
        "nothing to set: ckptsync lists, and never looks for a name that may not exist yet",
    )  # fmt: skip


def _listed(pair: _Pair) -> Check:
    delay = pair.median_delay("listed", lambda path: put_bytes(pair.store, path, b"here"))
    return _delayed("a new file", delay, "is listed", f"watch --poll {max(1, round(delay)) if delay < 1e9 else 30}")


def _overwritten(pair: _Pair) -> Check:
    delay = pair.median_delay("changed", lambda path: put_bytes(pair.store, path, b"new"), before=b"old")
    return _delayed(
        "a file that was replaced", delay, "reads new", "nothing to set: head.json is a hint, the listing is the truth"
    )


def _deleted(pair: _Pair) -> Check:
    delay = pair.median_delay("gone", pair.store.delete, before=b"here")
    return _delayed("a file that was deleted", delay, "is gone", "gc with a longer --grace")


def _delayed(what: str, delay: float, seen: str, remedy: str) -> Check:
    if delay == float("inf"):
        return Check(what, "bad", f"never {seen} for the other process (30 s)", "turn off this mount's caches")
    status = "ok" if delay < SLOW else "warn"
    return Check(
        what, status, f"{seen} for the other process after {delay * 1000:.0f} ms", remedy if delay >= SLOW else ""
    )


def _whole(pair: _Pair) -> Check:
    """Replace a file again and again while the other reads it."""
    path, seconds = f"{pair.folder}/overwritten", 2.0
    put_bytes(pair.store, path, bytes(OVERWRITTEN_BYTES))
    question = Question(what="read", path=path, seconds=seconds, count=OVERWRITTEN_BYTES)
    number = pair.talk.ask(question)
    for value in range(1, OVERWRITES + 1):
        put_bytes(pair.store, path, bytes([value]) * OVERWRITTEN_BYTES)
    whole, torn = pair.talk.answer(number, seconds).counts
    detail = f"{whole} reads of a file that was replaced meanwhile were whole, {torn} were not"
    if torn:
        return Check(
            "replacing is atomic", "warn", detail, "nothing to set: versions are never replaced, only hints are"
        )
    return Check("replacing is atomic", "ok", detail)


def _events(pair: _Pair) -> Check:
    if not isinstance(pair.store, LocalStore):
        return Check("events", "ok", "an object store tells none; watchers poll")
    put_bytes(pair.store, f"{pair.folder}/watched/first", b"here")
    number = pair.talk.ask(Question(what="event", path=f"{pair.folder}/watched/second", seconds=3.0))
    put_bytes(pair.store, f"{pair.folder}/watched/second", b"here")
    done, at = time.time(), pair.talk.answer(number, 3.0).at
    if not at:
        return Check("events", "ok", "none from the other side: watchers find versions by polling", "watch --poll 1")
    return Check(
        "events", "ok", f"the other side is told of a new file after {max(0.0, at - pair.offset - done) * 1000:.0f} ms"
    )


def _durable(store: Store) -> Check:
    """What one small durable file costs: a commit is four of them."""
    path, seconds = f"{TRIALS}/{uuid.uuid4().hex}", []
    with deleted_after(store, path):
        for _ in range(SAMPLES):
            seconds.append(_timed(lambda: put_bytes(store, path, bytes(4096))))
    return Check("one small durable file", "ok", f"{statistics.median(seconds) * 1000:.1f} ms (median of {SAMPLES})")


def _against_raw(store: LocalStore) -> Check:
    """Our write of one file against `write` and `fsync` of the same bytes, in turns."""
    data = os.urandom(1 << 20) * 64
    ours, raw = [], []
    for _ in range(3):
        path = f"{TRIALS}/{uuid.uuid4().hex}"
        with deleted_after(store, path):
            ours.append(_timed(lambda path=path: put_bytes(store, path, data)))  # type: ignore[misc]
            raw.append(_timed(lambda path=path: _write_plainly(os.path.join(store.url, path), data)))  # type: ignore[misc]
    ratio = min(raw) / min(ours)
    return Check(
        "throughput against raw", "ok", f"{ratio:.2f} of plain write and fsync ({len(data) / min(raw) / 1e9:.2f} GB/s)"
    )


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _write_plainly(path: str, data: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


@contextmanager
def _session(root: str, store: Store, hosts: int) -> Iterator[Conversation]:
    talk = Conversation(store, uuid.uuid4().hex, _NO_PEER[hosts].format(root=root))
    try:
        put_bytes(store, f"{talk.folder}/lead.json", b"{}")
        with _second(root, talk.session) if hosts == 1 else nullcontext():
            talk.ask(Question(what="time"), within=60.0 if hosts == 1 else 600.0)  # until it is there
            yield talk
            talk.end()
    finally:
        talk.clear()


@contextmanager
def _second(root: str, session: str) -> Iterator[None]:
    """The second process, on this host. It holds the other end of a pipe, and ends with us however we end."""
    command = [sys.executable, "-m", "ckptsync.cli", "doctor", root, "--peer", "--session", session]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as peer:
        try:
            yield
        finally:
            peer.terminate()


_NO_PEER = {
    1: "the second process ended, or does not see what is written here: its words are above",
    2: "run `ckptsync doctor {root} --peer` on the other host while this waits; its ROOT is the same folder there",
}
"""By the number of hosts."""


PROMISES: dict[str, Callable[[_Pair], Check]] = {
    "create-if-absent between clients": _create,
    "a name that was looked for too early": _named,
    "a new file": _listed,
    "a file that was replaced": _overwritten,
    "a file that was deleted": _deleted,
    "replacing is atomic": _whole,
    "events": _events,
}
