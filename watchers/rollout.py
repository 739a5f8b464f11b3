"""One version's way through a fleet: who may load it now, who has, and who could not.

Members ask; nobody is told. So a replica that hangs or is away takes no place in a batch, and holds nobody. All
at once, or in batches:

- a batch is at most `at_once` members, and the next one opens when every member of it is decided: it confirmed
  the version, failed, or let its deadline pass;
- while nobody has confirmed the version, no batch after the first opens. A version that fails wherever it is
  loaded reaches one batch, and the rest of the fleet serves the old one on.

A member that has no version at all is given the version before this one until its turn comes. One that a trainer has
brought something newer, by a fast path and without files, is left alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptsync.channel import Channel
from ckptsync.errors import EngineDirty, EngineError, EngineRefused, EngineUnavailable, InvalidInput
from ckptsync.manifest import Manifest
from ckptsync.version import VersionId

from .discover import Verdict, left_behind
from .health import Receipt


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many members make a version the fleet's: a number, or percent of those that there are."""

    amount: int
    percent: bool = False

    @classmethod
    def parse(cls, text: str) -> Quorum:
        """`3` or `60%`. InvalidInput for anything else."""
        number, percent = text.removesuffix("%"), text.endswith("%")
        if not number.isdecimal() or not 0 < int(number) <= (100 if percent else 1 << 31):
            raise InvalidInput(f"a quorum is a number such as 3, or percent such as 60%, not {text!r}")
        return cls(int(number), percent)

    def of(self, members: int) -> int:
        """At least 1: a fleet without members has no quorum."""
        return max(1, math.ceil(members * self.amount / 100)) if self.percent else self.amount


def parse_rollout(text: str) -> int | None:
    """How many at once: None for `all`, N for `rolling:N`. InvalidInput for anything else."""
    word, _, number = text.partition(":")
    if text == "all":
        return None
    if word == "rolling" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise InvalidInput(f"a rollout is all, or rolling:N such as rolling:2, not {text!r}")


LOOKS_TO_BE_AWAY = 3
"""A member is out of reach when its engine did not answer at so many looks: one may be a hiccup."""


class Rollout:
    """From any thread. `deadline`: seconds from a member's turn to its outcome. `before`: the version before this
    one, for who has none. `back`: it is also for members that hold something newer."""

    def __init__(
        self,
        target: Manifest,
        *,
        at_once: int | None,
        deadline: float,
        before: Manifest | None = None,
        back: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target, self.before = target, before
        self.confirmed: set[str] = set()
        self.failed: dict[str, str] = {}
        """Member -> why. It may confirm the version yet."""
        self.overdue: set[str] = set()
        """Those of `failed` of which nothing was heard: hung in mid-load, as far as anybody can tell."""
        self.ahead: set[str] = set()
        """Members that hold something newer, and keep it."""
        self._at_once, self._deadline, self._clock, self._back = at_once, deadline, clock, back
        self._turns: dict[str, float] = {}
        self._kept: dict[str, int] = {}
        self._touched: set[str] = set()
        self._batch: set[str] = set()
        self._over = False
        self._lock = threading.RLock()

    def leaves(self, member: str, current: VersionId, channel: Channel) -> bool:
        """Does it hold something newer, which it is to keep?"""
        ahead = not self._back and current > self.target.id and not left_behind(channel, current)
        with self._lock:
            (self.ahead.add if ahead else self.ahead.discard)(member)
        return ahead

    def admits(self, member: str, current: VersionId | None) -> bool:
        """Is it this member's turn to load the version? `current` is what it was proven to hold."""
        with self._lock:
            if current == self.target.id:
                self._confirm(member)
                return False
            if self._over:
                return False
            if member in self._turns and member not in self.failed:
                return True
            if not self._join_batch(member):
                return False
            self.failed.pop(member, None)
            self.overdue.discard(member)
            self._turns[member] = self._clock()
            return True

    def declines(self, member: str) -> None:
        """It has tried this version before, and will not again."""
        with self._lock:
            if member not in self.confirmed:
                self.failed.setdefault(member, "it was tried there before, and is not tried again")

    def tell(self, member: str, receipt: Receipt) -> None:
        """What came of an attempt; one at another version is no news."""
        if receipt.version != self.target.id.label:
            return
        with self._lock:
            if receipt.state == "serving" and receipt.error is None:
                self._confirm(member)
            else:
                self.overdue.discard(member)
                (self._touched.discard if receipt.state == "refused" else self._touched.add)(member)
                self.failed[member] = receipt.error["message"] if receipt.error else receipt.state

    def check_deadlines(self) -> None:
        with self._lock:
            for member in self._undecided(self._turns):
                if self._clock() - self._turns[member] > self._deadline:
                    self.overdue.add(member)
                    self.failed[member] = f"nothing was heard of it for {self._deadline:.0f} s"

    def withdraws(self, member: str) -> bool:
        """It did not come to load the version, of which nothing is known by that. True if its place is free now."""
        with self._lock:
            if member in self.failed or member in self.confirmed:
                return False
            self._kept[member] = self._kept.get(member, 0) + 1
            self._batch.discard(member)
            return self._turns.pop(member, None) is not None

    def left(self, member: str) -> None:
        """It is no longer of the fleet. Its failure, if it had one, still counts against the version."""
        with self._lock:
            self.confirmed.discard(member)
            self.ahead.discard(member)
            self.withdraws(member)
            self._kept.pop(member, None)

    def end(self) -> None:
        """Nobody else begins it: another version's turn has come."""
        with self._lock:
            self._over = True

    @property
    def holders(self) -> set[str]:
        """Who holds this version, or a newer one."""
        with self._lock:
            return self.confirmed | self.ahead

    @property
    def proven(self) -> bool:
        """Somebody has confirmed it, so it can be loaded."""
        return bool(self.confirmed)

    @property
    def stopped(self) -> bool:
        """The first batch failed, and nobody else is let in."""
        with self._lock:
            full = self._at_once is not None and len(self._batch) >= self._at_once
            return full and not self.proven and not self._undecided(self._batch)

    @property
    def out_of_reach(self) -> set[str]:
        """Members that were kept from the version again and again, and to which nothing was attempted. One of them
        comes back by taking its turn."""
        with self._lock:
            kept = [member for member, looks in self._kept.items() if looks >= LOOKS_TO_BE_AWAY]
            return set(self._undecided(kept)) - self._turns.keys()

    @property
    def in_doubt(self) -> set[str]:
        """Members whose weights were touched without success, or may be at this moment."""
        with self._lock:
            return (self._touched & self.failed.keys()) | self.overdue | set(self._undecided(self._turns))

    def can_reach(self, quorum: int, members: Iterable[str]) -> bool:
        """Whether so many may hold it yet: somebody is at it, or enough are still to come."""
        with self._lock:
            coming = set() if self.stopped else set(self._undecided(members)) - self.out_of_reach
            return bool(self._undecided(self._turns)) or len(self.holders) + len(coming) >= quorum

    def no_quorum(self, why: str) -> EngineError:
        """What to raise for that."""
        text = f"{self.target.id.label} has no quorum: {why}"
        if self.in_doubt:
            return EngineDirty(text)
        return EngineRefused(text) if self.failed and not self.out_of_reach else EngineUnavailable(text)

    def settled(self, serving: Iterable[str]) -> bool:
        """Nobody is at it, and none of the members that serve has still to come; the others hold nobody."""
        with self._lock:
            return not self._undecided(self._turns) and (self.stopped or not self._undecided(serving))

    # -- inside ------------------------------------------------------------------------------------------

    def _confirm(self, member: str) -> None:
        self._turns.setdefault(member, self._clock())
        self.confirmed.add(member)
        self.failed.pop(member, None)
        self.overdue.discard(member)

    def _join_batch(self, member: str) -> bool:
        if self._at_once is None or member in self._batch:
            return True
        if len(self._batch) >= self._at_once:
            if self._undecided(self._batch) or not self.proven:
                return False
            self._batch = set()
        self._batch.add(member)
        return True

    def _undecided(self, members: Iterable[str]) -> list[str]:
        with self._lock:
            return [member for member in members if member not in self.confirmed | self.failed.keys() | self.ahead]


class Directed:
    """A member's subscription: what its fleet's present rollout lets it load. The fleet looks at the store."""

    def __init__(self, member: str, rollout: Callable[[], Rollout | None]) -> None:
        self._member, self._rollout = member, rollout

    def __str__(self) -> str:
        return "its fleet"

    def next(
        self,
        channel: Channel,
        current: VersionId | None,
        verdict: Callable[[Manifest], Verdict],
    ) -> Manifest | None:
        rollout = self._rollout()
        if rollout is None or (current is not None and rollout.leaves(self._member, current, channel)):
            return None
        answer = verdict(rollout.target)
        if answer == "try" and rollout.admits(self._member, current):
            return rollout.target
        if answer == "never":
            rollout.declines(self._member)
        before = rollout.before if current is None else None
        return before if before is not None and verdict(before) == "try" else None
