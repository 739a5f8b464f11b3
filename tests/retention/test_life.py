"""Random lives of a channel, with readers; and protocol bugs that they have to find."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from ckptsync import collect, epochs, ledger
from ckptsync.errors import EngineDirty
from ckptsync.store import open_store
from ckptsync.store.base import Store
from ckptsync.testing.lifecycle import Lifecycle
from ckptsync.version import VersionId
from tests.drawn import First, look_at_the_laws
from tests.lora.models import TinyLM, randomise, with_adapter
from watchers.testing import WatchedLifecycle

AT_LENGTH = settings().max_examples > 100
"""Profiles of more than the usual hundred examples, in `make conformance`: a life takes as long as ten of theirs."""

pytestmark = pytest.mark.timeout(0 if AT_LENGTH else 300)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A life is full of warnings, and hypothesis keeps what is logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def live(machine: type[RuleBasedStateMachine], lives: int, steps: int = 25, **more: Any) -> None:
    wanted = settings(
        max_examples=settings().max_examples // 10 if AT_LENGTH else lives, stateful_step_count=steps, deadline=None,
        suppress_health_check=list(HealthCheck), **more,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=wanted)


class Life(WatchedLifecycle):
    """On a store that tells times, and with LoRA adapters among the versions."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = with_adapter(TinyLM(), 0, task_type=None)

    def fresh_store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}")

    @precondition(lambda self: self.trainer)
    @rule()
    def publish_adapter(self) -> None:
        assert self.trainer is not None
        self.steps += 1
        randomise(self.adapter, self.steps)
        done = self.trainer.publisher.publish(self.adapter, kind="adapter")
        self.is_published(done.version, done.content_digest, self.trainer.weights)


def test_the_laws_hold_over_a_channels_whole_life() -> None:
    live(Life, 8)


# What broke a law of a life and is none of the protocol's bugs.


def test_a_version_that_a_collector_noted_before_it_died_need_not_be_readable() -> None:
    for dies in range(16):
        life = Lifecycle()
        life.begin(deltas=False)
        life.publish(count=3, dies=None)
        look_at_the_laws(life)
        life.collect(last=2, every=None, branches=False, grace=0.0, dies=dies)
        life.read_every_byte(data=First())
        look_at_the_laws(life)


def test_a_trainer_that_a_rollback_replaced_is_not_back_when_the_next_one_dies_unnoticed() -> None:
    life = Lifecycle()
    life.begin(deltas=False)
    life.publish(count=2, dies=None)
    life.go_back(data=First(), dies=None)
    life.resume(data=First(), deltas=False, from_latest=True, dies=0)
    assert life.trainer is None
    life.publish_though_replaced(data=First())
    look_at_the_laws(life)


def test_an_engine_that_does_not_hear_its_resume_has_a_receipt_that_says_so() -> None:
    life = WatchedLifecycle()
    life.begin(deltas=False)
    life.publish(count=1, dies=None)
    life.reads_beside_an_engine_that_fails(which=0, step="resume", error=EngineDirty, times=3)
    assert life.readers[0].engine.paused
    look_at_the_laws(life)
    life.reads(which=0)
    assert not life.readers[0].engine.paused
    life.teardown()


# Bugs of the protocol, planted one at a time. The model finds these and more of them (tests/model/test_mutations.py).


def held_by_nobody(*_: object) -> dict[VersionId, str]:
    return {}


def by_number_alone(versions: Any, claims: object) -> list[VersionId]:
    return sorted(versions, key=lambda version: (version.number, version.epoch))


def none(*_: object, **__: object) -> None: ...


BUGS: dict[str, tuple[object, str, Any, str]] = {
    "holds are ignored": (collect, "held", held_by_nobody, "law 9"),
    "what a version needs is forgotten": (collect, "needs_of", lambda _: (), "law 9"),
    "order by number": (epochs, "live", by_number_alone, "law 8"),
    "no fence": (ledger, "check_fence", none, "had been replaced"),
}


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_breaks_a_law(bug: str) -> None:
    owner, name, instead, says = BUGS[bug]
    with mock.patch.object(owner, name, instead), ExitStack() as more:
        if bug == "no fence":
            more.enter_context(mock.patch.object(epochs, "check_fence", none))
        with pytest.raises(AssertionError, match=says):
            # Which lives are drawn depends on what else is imported: hypothesis takes constants out of sources.
            live(Lifecycle, 3000, phases=[Phase.generate], database=None, derandomize=True, report_multiple_bugs=False)
