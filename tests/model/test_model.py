"""Commit, fencing and retention: every schedule of a few actors that run the product's own code."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from ckptsync.testing.explore import explore
from ckptsync.version import VersionId

from .worlds import World, published

PREEMPTIONS = int(os.environ.get("CKPTSYNC_PREEMPTIONS", "1"))
"""Two take a few minutes (`make conformance`), three some hours."""

V1, V2, V3 = (VersionId(1, number) for number in (1, 2, 3))


def two_trainers_on_an_empty_root() -> World:
    world = World()
    return world.let("a", world.publish(1)).let("b", world.publish(2))


def a_trainer_that_replaces_another_under_a_reader() -> World:
    world = World(published(1))
    return world.let("old", world.publish(2)).let("new", world.publish(3)).let("reader", world.follow(2))


def a_resume_from_an_earlier_version_under_the_old_trainer() -> World:
    world = World(published(1, 2))
    return world.let("old", world.publish(3)).let("new", world.publish(4, resumed_from=V1))


def a_collector_beside_a_pin_and_a_lease() -> World:
    world = World(published(1, 2, 3))
    world.let("collector", world.collect())
    return world.let("pin", world.pin(V1)).let("lease", world.lease_and_read(V1))


def two_collectors_and_a_follower() -> World:
    world = World(published(1, 2, 3))
    world.let("one", world.collect()).let("two", world.collect())
    return world.let("reader", world.follow(1))


def a_rollback_beside_a_collector() -> World:
    world = World(published(1, 2, 3))
    return world.let("collector", world.collect()).let("rollback", world.go_back(V1))


def a_trainer_beside_a_collector_and_a_reader() -> World:
    world = World(published(1, 2))
    world.let("trainer", world.publish(3)).let("collector", world.collect())
    return world.let("reader", world.follow(2))


def a_sweep_under_a_frozen_trainer() -> World:
    world = World(published(1))
    return world.let("trainer", world.publish(2)).let("sweeper", world.sweep())


WORLDS = [
    two_trainers_on_an_empty_root,
    a_trainer_that_replaces_another_under_a_reader,
    a_resume_from_an_earlier_version_under_the_old_trainer,
    a_collector_beside_a_pin_and_a_lease,
    two_collectors_and_a_follower,
    a_rollback_beside_a_collector,
    a_trainer_beside_a_collector_and_a_reader,
    a_sweep_under_a_frozen_trainer,
]


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.__name__)
def test_no_schedule_breaks_a_law(world: Callable[[], World]) -> None:
    explore(world, preemptions=PREEMPTIONS)
