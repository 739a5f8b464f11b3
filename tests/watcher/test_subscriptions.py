"""What a reader can ask for, and what it is told when retention was faster."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.errors import InvalidName, VersionGone
from ckptsync.store import LocalStore, put_bytes
from ckptsync.testing.engines import FakeEngine
from ckptsync.testing.hooks import HookedStore, Recorder
from ckptsync.version import VersionId
from tests.retention.channels import Trainer, collect
from watchers.discover import Subscription, subscribe

from .actions import Watch, step
from .publish import TestPublisher


class Evaluator:
    """Takes what a subscription gives, at once."""

    def __init__(self, root: Any, follow: str | Subscription, current: VersionId | None = None) -> None:
        self.channel, self.subscription, self.current = Channel.open(root), subscribe(follow), current

    def take(self) -> int | None:
        manifest = self.subscription.next(self.channel, self.current, lambda _: "try")
        if manifest is None:
            return None
        self.current = manifest.id
        return manifest.number

    def take_all(self) -> list[int]:
        return list(iter(self.take, None))


@pytest.fixture
def trainer(root: str) -> Trainer:
    return Trainer(Channel.create(root))


def chain(trainer: Trainer, *numbers: int, **fields: Any) -> None:
    """Versions that name the one before them, as a Publisher's do."""
    for number in numbers:
        before = trainer.channel.committed()
        trainer.publish(number, previous=before[-1], **fields) if before else trainer.publish(number, **fields)


@pytest.mark.parametrize("wrong", ["newest", "every:0", "every:", "every:-1", "step>500", "step>=", "Every", "e1v1"])
def test_what_is_not_a_subscription_is_refused_with_those_that_are(wrong: str) -> None:
    with pytest.raises(InvalidName, match=r"every:10, 'step>=500', or a version"):
        subscribe(wrong)


def test_every_version_comes_in_order_whatever_was_published_meanwhile(root: str, trainer: Trainer) -> None:
    evaluator = Evaluator(root, "every")
    assert evaluator.take_all() == []
    chain(trainer, 1, 2, 3)
    assert evaluator.take() == 1
    chain(trainer, 4)
    assert evaluator.take_all() == [2, 3, 4]


def test_every_tenth_is_by_number_so_that_readers_and_retention_agree(root: str, trainer: Trainer) -> None:
    evaluator = Evaluator(root, "every:10")
    chain(trainer, *range(1, 26))
    assert evaluator.take_all() == [10, 20]
    collect(LocalStore(root), keep_every=10)
    chain(trainer, *range(26, 31))
    assert evaluator.take_all() == [30], "what was collected in between was not wanted"


def test_every_tenth_costs_one_small_read_a_look_while_there_is_nothing_to_take(root: str, trainer: Trainer) -> None:
    chain(trainer, 9, 10, 11, 12)
    recorder = Recorder()
    evaluator = Evaluator(HookedStore(LocalStore(root), recorder), "every:10")
    assert evaluator.take_all() == [10]
    recorder.seen.clear()
    assert evaluator.take() is None
    assert recorder.seen == [("open", "head.json")]


def test_a_version_that_was_collected_before_it_was_taken_is_an_error_once_and_then_it_goes_on(
    root: str, trainer: Trainer
) -> None:
    evaluator = Evaluator(root, "every")
    chain(trainer, 1)
    assert evaluator.take() == 1
    chain(trainer, 2, 3, 4, 5)
    collect(LocalStore(root))
    with pytest.raises(VersionGone, match="versions after e1-v1, up to e1-v3, were collected"):
        evaluator.take()
    assert evaluator.take_all() == [4, 5]


def test_an_evaluator_that_kept_its_place_is_told_of_what_went_while_it_was_away(root: str, trainer: Trainer) -> None:
    chain(trainer, 1, 2, 3, 4)
    collect(LocalStore(root))
    with pytest.raises(VersionGone):
        Evaluator(root, "every", current=VersionId(1, 1)).take()


def test_one_that_comes_new_begins_with_what_is_left_and_misses_nothing(root: str, trainer: Trainer) -> None:
    chain(trainer, *range(1, 26))
    collect(LocalStore(root), keep_every=10)
    evaluator = Evaluator(root, "every")
    assert evaluator.take_all() == [10, 20, 24, 25]
    chain(trainer, 26, 27, 28)
    collect(LocalStore(root))
    with pytest.raises(VersionGone, match="up to e1-v26"):
        evaluator.take()
    assert evaluator.take_all() == [27, 28]


def test_numbers_that_were_never_given_and_manifests_that_are_torn_are_not_missed(root: str, trainer: Trainer) -> None:
    evaluator = Evaluator(root, "every")
    chain(trainer, 1)
    assert evaluator.take() == 1
    chain(trainer, 10, 20)
    put_bytes(LocalStore(root), "manifests/e0001-v00000025.json", b'{"torn"')
    chain(trainer, 30)
    assert evaluator.take_all() == [10, 20, 30]


def test_case_22_a_branch_that_was_left_behind_is_not_missed(root: str, trainer: Trainer) -> None:
    evaluator = Evaluator(root, "every")
    chain(trainer, 1, 2, 3, 4)
    assert evaluator.take_all() == [1, 2, 3, 4]
    heir = Trainer(trainer.channel, VersionId(1, 2))
    heir.publish(3, previous=VersionId(1, 2))
    assert evaluator.take_all() == [3]
    assert evaluator.current == VersionId(2, 3)


def test_from_a_step_on_the_newest_is_taken(root: str, trainer: Trainer) -> None:
    evaluator = Evaluator(root, "step>=500")
    chain(trainer, 1, step=499)
    chain(trainer, 2)
    assert evaluator.take() is None
    chain(trainer, 3, step=500)
    assert evaluator.take() == 3
    chain(trainer, 4, 5, step=510)
    assert evaluator.take_all() == [5]


def test_before_its_step_has_come_only_the_newest_manifest_is_read(root: str, trainer: Trainer) -> None:
    chain(trainer, *range(1, 6), step=1)
    recorder = Recorder()
    assert Evaluator(HookedStore(LocalStore(root), recorder), "step>=9").take() is None
    assert [path for op, path in recorder.seen if op == "open" and "manifests" in path] == [
        "manifests/e0001-v00000005.json"
    ]


def test_a_watcher_says_what_it_missed_in_a_receipt_and_loads_the_next(
    watch: Watch,
    engine: FakeEngine,
    publisher: TestPublisher,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("ckptsync.holds.READER_SECONDS", 0.0)
    publisher.publish()
    watcher = watch(engine, follow="every")
    assert step(watcher).label == "e1-v1"
    for _ in range(3):
        publisher.publish()
    collect(LocalStore(root), grace=3600.0)
    missed = step(watcher)
    assert (missed.version, missed.state, missed.label) == ("e1-v2", "refused", "e1-v1")
    assert missed.error is not None
    assert missed.error["kind"] == "versions-missed"
    (line,) = [vars(record) for record in caplog.records if record.levelname == "WARNING"]
    assert (line["event"], line["version"], line["in_receipt"]) == ("versions-missed", "e1-v2", True)
    assert step(watcher).label == "e1-v3"
    assert watcher.health.ready
