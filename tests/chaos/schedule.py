"""The faults of a run, drawn before it begins: the same seed and the same actors give the same schedule."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

from .record import Fault

LASTS = {
    "kill": (0.0, 4.0),
    "freeze": (1.0, 6.0),
    "cut": (1.0, 6.0),
    "slow": (4.0, 10.0),
    "fill": (3.0, 8.0),
    "replace": (4.0, 8.0),
}
"""Seconds that a fault of each kind lasts. `kill`: until the process is started again; its own start comes on top."""

GAPS = (1.0, 5.0)
"""Seconds from the beginning of one fault to that of the next: several are under way at a time."""

RESTS = {"sglang": 90.0, "trainer": 20.0, "replace": 60.0, "fill": 30.0}
"""Seconds after a fault for those that take long to start and are to live for a while; and after one of a kind that
would leave its few actors no time for others."""

REST = 2.0
"""For all others."""

STARTS = 60.0
"""Seconds that a real engine has to start, beside the faults of others, before it is hit."""


def draw(seed: int, seconds: float, actors: Mapping[str, Sequence[str]]) -> list[Fault]:
    """Faults within `seconds`. `actors`: kind -> whom it can hit. The kinds take turns, and so do the actors of each,
    in an order that is drawn anew each time, so that a short run has some of everything."""
    rng = random.Random(seed)
    kinds, bags = _Bag(rng, sorted(actors)), {kind: _Bag(rng, actors[kind]) for kind in sorted(actors)}
    busy = {"sglang": STARTS}
    faults: list[Fault] = []
    at = rng.uniform(*GAPS)
    while at < seconds:
        idle = {kind: {each for each in actors[kind] if busy.get(group_of(each), 0.0) <= at} for kind in actors}
        if possible := {kind for kind in idle if idle[kind] and busy.get(kind, 0.0) <= at}:
            kind = kinds.take(possible)
            actor = bags[kind].take(idle[kind])
            lasts = min(rng.uniform(*LASTS[kind]), seconds - at)
            group = group_of(actor)
            busy |= {
                each: at + lasts + RESTS.get(each, REST) for each in (group, kind) if each in RESTS or each == group
            }
            faults.append(Fault(round(at, 2), round(lasts, 2), kind, actor))
        at += rng.uniform(*GAPS)
    return faults


def group_of(actor: str) -> str:
    """Who shares a fate: the ranks of a trainer are one job."""
    return "trainer" if actor.startswith("trainer") else actor


class _Bag:
    """Takes each thing once before any of them again, in an order that is drawn."""

    def __init__(self, rng: random.Random, things: Sequence[str]) -> None:
        self._rng, self._things, self._left = rng, list(things), list[str]()

    def take(self, wanted: Collection[str]) -> str:
        """The first of those that are wanted; one of them at least is among the things."""
        if not any(thing in wanted for thing in self._left):
            more = [thing for thing in self._things if thing not in self._left]
            self._rng.shuffle(more)
            self._left += more
        found = next(thing for thing in self._left if thing in wanted)
        self._left.remove(found)
        return found
