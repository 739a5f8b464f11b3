"""`max_lag`: a publish that waits for slow readers, if it was asked to, and never for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.errors import InvalidInput
from ckptsync.publish import Publisher
from ckptsync.published import Published
from ckptsync.store import open_store, put_bytes
from ckptsync.testing.hooks import HookedStore, Recorder
from tests.trainer.ranks_harness import returned, run_ranks
from tests.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptsync.pressure.POLL", 0.01)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), value)}


def serves(root: str, reader: str, label: str, **said: object) -> None:
    record = {"label": label, "follow": "latest", "seen": time.time(), **said}
    Channel.open(root).write_receipt(reader, record)


class InThread:
    """A publish that may wait."""

    def __init__(self, publish: Callable[[], Published]) -> None:
        self.done: Published | None = None
        self._publish = publish
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.done = self._publish()

    def result(self) -> Published:
        self._thread.join(60)
        assert self.done is not None
        return self.done


def test_by_default_no_reader_is_asked(root: str) -> None:
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder)) as publisher:
        publisher.publish(weights(1.0))
    assert not [path for _, path in recorder.seen if path.startswith("receipts")]


def test_a_publish_waits_until_the_slow_reader_has_come_near(root: str) -> None:
    looked = threading.Event()

    def hook(operation: str, path: str) -> None:
        if (operation, path) == ("list", "receipts"):
            looked.set()

    with Publisher(HookedStore(open_store(root), hook), max_lag=2) as publisher:
        publisher.publish(weights(0.0))
        serves(root, "slow", "e1-v1")
        for value in (1.0, 2.0):
            publisher.publish(weights(value))
        publisher.publish(weights(3.0))
        looked.clear()
        pending = InThread(lambda: publisher.publish(weights(4.0)))
        assert looked.wait(30)
        looked.clear()
        assert looked.wait(30), "it looks again"
        assert pending.done is None
        assert Channel.open(root).latest().number == 4
        serves(root, "slow", "e1-v3")
        assert pending.result().version.number == 5


def test_it_waits_no_longer_than_it_was_told_to_and_names_the_reader_once(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(root, max_lag=1, max_lag_seconds=0.1) as publisher:
        publisher.publish(weights(0.0))
        serves(root, "stuck", "e1-v1")
        for value in range(1, 5):
            publisher.publish(weights(value))
        assert caplog.text.count("stuck serves e1-v1, 2 versions behind") == 1
        assert caplog.text.count("max_lag") == 1, "not waited for again until it moves"
        serves(root, "stuck", "e1-v2")
        publisher.publish(weights(9.0))
    assert "stuck serves e1-v2, 3 versions behind" in caplog.text


def test_with_no_time_to_wait_it_only_says_so(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher(root, max_lag=1, max_lag_seconds=0.0) as publisher:
        publisher.publish(weights(0.0))
        serves(root, "slow", "e1-v1")
        for value in range(1, 4):
            publisher.publish(weights(value))
    assert "slow serves e1-v1" in caplog.text


@pytest.mark.parametrize(
    "said",
    [{"follow": "42"}, {"follow": "every:10"}, {"follow": "step>=9"}, {"label": ""}],
    ids=["stays", "takes few", "waits", "has none yet"],
)
def test_a_reader_that_does_not_follow_the_newest_is_not_waited_for(
    root: str, caplog: pytest.LogCaptureFixture, said: dict[str, str]
) -> None:
    with Publisher(root, max_lag=1, max_lag_seconds=60.0) as publisher:
        publisher.publish(weights(0.0))
        serves(root, "reader", **{"label": "e1-v1", **said})  # type: ignore[arg-type]
        for value in range(1, 4):
            publisher.publish(weights(value))
    assert "max_lag" not in caplog.text


def test_a_dead_reader_is_not_waited_for(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptsync.holds.READER_SECONDS", -1.0)
    with Publisher(root, max_lag=1, max_lag_seconds=60.0) as publisher:
        publisher.publish(weights(0.0))
        serves(root, "dead", "e1-v1")
        for value in range(1, 4):
            publisher.publish(weights(value))
    assert Channel.open(root).latest().number == 4


def test_receipts_that_cannot_be_read_hold_nobody_up(root: str, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher(root, max_lag=1, max_lag_seconds=60.0) as publisher:
        put_bytes(open_store(root), "receipts/r.json", b"{")
        publisher.publish(weights(0.0))
    assert "nobody is waited for" in caplog.text


def test_in_the_background_the_training_waits_at_the_next_publish_and_not_in_the_step(root: str) -> None:
    with Publisher(root, max_lag=1, max_lag_seconds=60.0) as publisher:
        publisher.publish(weights(0.0))
        publisher.publish(weights(1.0))
        publisher.publish(weights(2.0))
        serves(root, "slow", "e1-v1")
        pending = publisher.publish(weights(3.0), background=True)
        assert not pending.done()
        serves(root, "slow", "e1-v3")
        until(pending.done)
        assert pending.result().version.number == 4


@pytest.mark.parametrize(
    "wrong", [{"max_lag": 0}, {"max_lag_seconds": -1.0}, {"max_lag_seconds": 50.0, "max_lag": 1, "timeout": 50.0}]
)
def test_a_setting_that_cannot_be_meant_is_refused_by_name(root: str, wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Publisher(root, **wrong)


def publish_with_a_slow_reader(rank: int, root: str) -> list[int]:
    with Publisher(root, max_lag=1, max_lag_seconds=1.0) as publisher:
        publisher.publish(weights(0.0))
        if rank == 0:
            serves(root, "slow", "e1-v1")
        return [publisher.publish(weights(value)).version.number for value in range(1, 4)]


@pytest.mark.distributed
@pytest.mark.slow
def test_all_ranks_wait_with_rank_0(root: str) -> None:
    assert returned(run_ranks(2, publish_with_a_slow_reader, root)) == [[2, 3, 4]] * 2
