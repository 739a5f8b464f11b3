"""A schedule is drawn before the run: from the seed and the actors alone."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise

import pytest

from .faults import Target, check, play
from .record import Fault
from .schedule import RESTS, draw, group_of

ACTORS = {
    "kill": ["sglang", "embedded-1", "trainer rank 0", "trainer rank 1"],
    "freeze": ["embedded-1", "watcher"],
    "cut": ["link one", "link two"],
    "replace": ["trainer"],
}


def test_a_seed_gives_its_schedule_and_another_seed_another() -> None:
    assert draw(7, 300, ACTORS) == draw(7, 300, ACTORS) != draw(8, 300, ACTORS)


def test_a_longer_run_begins_as_a_shorter_one_does() -> None:
    short, long = draw(7, 60, ACTORS), draw(7, 600, ACTORS)
    over = [fault for fault in short if fault.at + fault.seconds < 60]
    assert over == long[: len(over)]


def test_everybody_gets_every_kind_in_the_end_and_every_kind_comes_early() -> None:
    assert {(f.kind, f.actor) for f in draw(1, 600, ACTORS)} == {(kind, a) for kind in ACTORS for a in ACTORS[kind]}
    assert {fault.kind for fault in draw(1, 45, ACTORS)} == set(ACTORS)


def test_faults_end_with_the_run_and_never_meet_on_one_actor() -> None:
    faults = draw(1, 600, ACTORS)
    assert max(fault.at + fault.seconds for fault in faults) <= 600.01
    for group in {group_of(fault.actor) for fault in faults}:
        mine = [fault for fault in faults if group_of(fault.actor) == group]
        rest = RESTS.get(group, 2.0)
        assert all(a.at + a.seconds + rest <= b.at + 0.02 for a, b in pairwise(mine))


def test_a_fault_begins_and_ends_and_others_do_not_wait_for_it() -> None:
    events: list[str] = []
    targets = {
        "cut": {
            name: Target(partial(events.append, f"{name} down"), partial(events.append, f"{name} up"))
            for name in ("one", "two")
        }
    }
    faults = [Fault(0.1, 0.05, "cut", "two"), Fault(0.0, 0.4, "cut", "one")]
    happened = play(faults, targets, time.time())
    assert events == ["one down", "two down", "two up", "one up"]
    assert [(fault.kind, fault.actor) for fault in happened] == [("cut", "one"), ("cut", "two")]


def test_a_recorded_fault_that_cannot_be_had_here_is_named_before_the_run() -> None:
    with pytest.raises(ValueError, match="cut of link one: not here"):
        check([Fault(1, 1, "cut", "link one")], {"kill": {}, "cut": {}})
