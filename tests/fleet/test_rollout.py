"""Whose turn it is: batches, deadlines, and the stop after a first batch that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.errors import EngineDirty, EngineUnavailable, InvalidInput
from ckptsync.manifest import Manifest
from tests.watcher.publish import TestPublisher
from watchers.health import Outcome, Receipt, describe
from watchers.rollout import LOOKS_TO_BE_AWAY, Quorum, Rollout, parse_rollout


@pytest.fixture
def target(tmp_path: Path) -> Manifest:
    return TestPublisher(str(tmp_path / "root")).publish()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def receipt(state: Outcome, version: str = "e1-v1") -> Receipt:
    error = None if state == "serving" else describe(EngineDirty("broken"))
    return Receipt(version=version, state=state, label="", since=0.0, engine="fake", error=error)


def test_all_are_admitted_at_once(target: Manifest) -> None:
    rollout = Rollout(target, at_once=None, deadline=60)
    assert all(rollout.admits(name, None) for name in "abcdefgh")


def test_a_batch_is_as_large_as_it_may_be_and_the_next_waits_until_each_of_it_is_decided(target: Manifest) -> None:
    rollout = Rollout(target, at_once=2, deadline=60)
    assert [rollout.admits(name, None) for name in "abc"] == [True, True, False]
    rollout.tell("a", receipt("serving"))
    assert not rollout.admits("c", None), "b is at it still"
    rollout.tell("b", receipt("failed"))
    assert [rollout.admits(name, None) for name in "cde"] == [True, True, False]


def test_nobody_is_let_in_after_a_first_batch_that_failed_until_one_of_it_confirms(target: Manifest) -> None:
    rollout = Rollout(target, at_once=1, deadline=60)
    assert rollout.admits("a", None)
    rollout.tell("a", receipt("failed"))
    assert rollout.stopped
    assert not rollout.admits("b", None)
    assert rollout.admits("a", None), "it may be tried there again"
    rollout.tell("a", receipt("serving"))
    assert not rollout.stopped
    assert rollout.admits("b", None)


def test_a_failure_still_counts_when_its_member_has_left(target: Manifest) -> None:
    rollout = Rollout(target, at_once=1, deadline=60)
    rollout.admits("a", None)
    rollout.tell("a", receipt("dirty"))
    rollout.left("a")
    assert not rollout.admits("b", None)


def test_the_place_of_a_member_that_left_in_the_middle_is_free(target: Manifest) -> None:
    rollout = Rollout(target, at_once=1, deadline=60)
    rollout.admits("a", None)
    rollout.left("a")
    assert rollout.admits("b", None)


def test_a_member_that_could_not_begin_leaves_its_place_and_says_nothing_of_the_version(target: Manifest) -> None:
    rollout = Rollout(target, at_once=1, deadline=60)
    rollout.admits("a", None)
    rollout.withdraws("a")
    assert not rollout.stopped
    assert rollout.admits("b", None)
    assert not rollout.admits("a", None), "it has to wait like everybody else"


def test_a_member_that_failed_needs_a_place_to_try_again(target: Manifest) -> None:
    rollout = Rollout(target, at_once=1, deadline=60)
    rollout.admits("a", None)
    rollout.tell("a", receipt("serving"))
    rollout.admits("b", None)
    rollout.tell("b", receipt("failed"))
    rollout.admits("c", None)
    assert not rollout.admits("b", None), "c is at it"
    rollout.tell("c", receipt("serving"))
    assert rollout.admits("b", None)


def test_a_deadline_ends_the_wait_for_a_member_and_its_late_answer_counts(target: Manifest) -> None:
    clock = Clock()
    rollout = Rollout(target, at_once=1, deadline=60, clock=clock)
    rollout.admits("a", None)
    rollout.tell("a", receipt("serving"))
    rollout.admits("b", None)
    clock.now = 59.0
    rollout.check_deadlines()
    assert not rollout.admits("c", None)
    clock.now = 61.0
    rollout.check_deadlines()
    assert (rollout.overdue, rollout.admits("c", None)) == ({"b"}, True)
    rollout.tell("b", receipt("serving"))
    assert (rollout.overdue, rollout.confirmed) == (set(), {"a", "b"})


def test_a_receipt_for_another_version_is_no_outcome(target: Manifest) -> None:
    rollout = Rollout(target, at_once=None, deadline=60)
    rollout.admits("a", None)
    rollout.tell("a", receipt("serving", "e1-v0"))
    assert not rollout.proven


def test_who_holds_the_version_has_confirmed_it(target: Manifest) -> None:
    rollout = Rollout(target, at_once=None, deadline=60)
    assert not rollout.admits("a", target.id)
    assert rollout.confirmed == {"a"}


def test_an_ended_rollout_lets_nobody_in(target: Manifest) -> None:
    rollout = Rollout(target, at_once=None, deadline=60)
    rollout.end()
    assert not rollout.admits("a", None)


@pytest.mark.parametrize(
    ("text", "members", "need"), [("2", 5, 2), ("60%", 5, 3), ("100%", 7, 7), ("51%", 2, 2), ("1%", 0, 1)]
)
def test_a_quorum_is_a_number_or_a_share(text: str, members: int, need: int) -> None:
    assert Quorum.parse(text).of(members) == need


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-1", "half", "5.5%"])
def test_a_quorum_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="quorum"):
        Quorum.parse(text)


def test_a_rollout_is_all_or_so_many() -> None:
    assert (parse_rollout("all"), parse_rollout("rolling:3")) == (None, 3)
    for text in ("", "rolling", "rolling:0", "rolling:x", "some", "all:2"):
        with pytest.raises(InvalidInput, match="rollout"):
            parse_rollout(text)


def test_a_quorum_can_come_while_somebody_is_at_it_or_enough_are_to_come(target: Manifest) -> None:
    rollout = Rollout(target, at_once=None, deadline=60)
    for _ in range(LOOKS_TO_BE_AWAY):
        assert rollout.can_reach(2, "ab")
        rollout.withdraws("b")
    assert rollout.out_of_reach == {"b"}
    assert not rollout.can_reach(2, "ab")
    assert rollout.admits("a", None)
    assert rollout.can_reach(2, "ab"), "what becomes of it is known soon"
    rollout.tell("a", receipt("serving"))
    assert not rollout.can_reach(2, "ab")
    assert isinstance(rollout.no_quorum("b is away"), EngineUnavailable)
    assert rollout.admits("b", None)
    assert rollout.out_of_reach == set(), "it has come back"
    assert isinstance(rollout.no_quorum("b is at it"), EngineDirty)
