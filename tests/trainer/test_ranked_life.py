"""Law 7 over whole lives: real ranks that fail, disagree and die; and bugs that these lives have to find."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from ckptsync.ranks import Ranks
from tests.drawn import First, look_at_the_laws
from tests.trainer.ranked_life import Bug, RankedLifecycle

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(3600)]

AT_LENGTH = settings().max_examples > 100


@pytest.fixture
def life(tmp_path: Path) -> Iterator[type[RankedLifecycle]]:
    numbers = iter(range(1 << 30))
    logging.disable(logging.CRITICAL)
    yield type("Life", (RankedLifecycle,), {"folder": staticmethod(lambda: str(tmp_path / str(next(numbers))))})
    logging.disable(logging.NOTSET)


def live(machine: type[RankedLifecycle], lives: int, steps: int) -> None:
    wanted = settings(
        max_examples=lives, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate], database=None, derandomize=True, report_multiple_bugs=False,
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=wanted)


def test_the_laws_hold_over_the_life_of_a_channel_whose_trainers_have_ranks(life: type[RankedLifecycle]) -> None:
    live(life, *((40, 25) if AT_LENGTH else (2, 10)))


def test_the_laws_hold_while_ranks_fail_disagree_run_full_are_replaced_and_die(life: type[RankedLifecycle]) -> None:
    """One life by hand, so that each of these happens."""
    channel = life()
    steps: list[Callable[[], None]] = [
        partial(channel.begin, deltas=True),
        partial(channel.publish, count=2, dies=None),
        partial(channel.a_rank_fails, rank=1, at=1),
        partial(channel.a_rank_disagrees, rank=2, at=0),
        partial(channel.the_store_is_full, at=3),
        partial(channel.publish, count=1, dies=None),
        partial(channel.a_rank_dies, rank=2, at=1),
        partial(channel.resume, data=None, deltas=False, from_latest=True, dies=None),
        partial(channel.publish, count=1, dies=2),
        partial(channel.resume, data=None, deltas=True, from_latest=True, dies=None),
        partial(channel.resume, data=None, deltas=True, from_latest=True, dies=None),
        partial(channel.publish_though_replaced, data=First()),
        partial(channel.publish, count=1, dies=None),
    ]
    try:
        for step in steps:
            step()
            look_at_the_laws(channel)
        assert [str(version) for version in channel.committed()] == ["e1-v1", "e1-v2", "e1-v3", "e4-v4"]
    finally:
        channel.teardown()


# Bugs of ranks, planted in all of them.


def each_for_itself() -> None:
    """Ranks other than 0 decide, too."""

    def broadcast(self: Ranks, value: Any) -> Any:
        return [value, self.gather(value)][0]

    Ranks.broadcast = broadcast  # type: ignore[method-assign]


def others_look() -> None:
    """A rank that is not the writer looks at the store."""
    Ranks.is_writer = True  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("bug", [each_for_itself, others_look])
def test_a_planted_bug_breaks_law_7(life: type[RankedLifecycle], bug: Bug) -> None:
    life.bug = staticmethod(bug)
    channel = life()
    try:
        with pytest.raises(AssertionError, match="law 7"):
            channel.begin(deltas=False)
    finally:
        channel.teardown()
