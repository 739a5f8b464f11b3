"""Retention beside a publisher: off the publish path, on rank 0, and never at start-up."""

from __future__ import annotations

import threading

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.errors import InvalidInput, StoreUnavailable
from ckptsync.publish import Publisher
from ckptsync.retention import Retention
from ckptsync.store import LocalStore, open_store
from ckptsync.testing.hooks import Failing, HookedStore, Recorder, matching
from ckptsync.verify import verify_version
from tests.trainer.models import TinyModel, shard
from tests.trainer.ranks_harness import returned, run_ranks
from tests.waiting import until

from .channels import numbers

TWO = Retention(keep_last=2, grace=0.0)


@pytest.fixture(autouse=True)
def without_pause(monkeypatch):
    monkeypatch.setattr("ckptsync.keeper.PAUSE", 0.0)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), value)}


def test_a_trainer_keeps_the_newest_and_readers_find_them_whole(disk):
    with Publisher(disk, retention=TWO) as publisher:
        for step in range(6):
            publisher.publish(weights(step))
    assert numbers(disk) == [5, 6]
    channel = Channel.open(disk)
    assert all(verify_version(channel, version).ok for version in channel.committed())
    assert {entry.path.split("/")[0] for entry in disk.list("")} == {
        "channel.json", "data", "epochs", "head.json", "manifests",
    }  # fmt: skip


def test_nothing_of_another_run_is_deleted_at_start_up(disk):
    with Publisher(disk) as publisher:
        for step in range(5):
            publisher.publish(weights(step))
    recorder = Recorder()
    with Publisher(HookedStore(disk, recorder), retention=TWO):
        pass
    assert numbers(disk) == [1, 2, 3, 4, 5]
    assert not [path for operation, path in recorder.seen if operation == "delete" and "probe" not in path]


def test_a_publish_does_not_wait_for_a_collector_that_hangs(disk):
    reached, opened = threading.Event(), threading.Event()

    def hang(operation: str, path: str) -> None:
        if operation == "delete" and path.startswith("manifests/"):
            reached.set()
            assert opened.wait(60)

    with Publisher(HookedStore(disk, hang), retention=TWO) as publisher:
        for step in range(3):
            publisher.publish(weights(step))
        assert reached.wait(30)
        publisher.publish(weights(9.0))
        assert Channel.open(disk).latest().number == 4
        opened.set()
    assert numbers(disk) == [3, 4]


def test_a_collector_that_fails_says_so_once_and_the_next_version_is_another_chance(disk, caplog):
    away = Failing(lambda: StoreUnavailable("away"), matching("create", part="collector/"))
    with Publisher(HookedStore(disk, away), retention=TWO) as publisher:
        for step in range(3):
            publisher.publish(weights(step))
        until(lambda: "nothing was collected: away" in caplog.text)
        away.times = 0
        publisher.publish(weights(9.0))
    assert numbers(disk) == [3, 4]
    assert caplog.text.count("nothing was collected") == 1


def test_case_5_a_version_ends_only_after_the_one_that_pushes_it_out_is_durable(disk):
    """A background publish that never gets to its commit."""
    fails = Failing(lambda: StoreUnavailable("killed"), matching("create", suffix="v00000003.json"))
    with Publisher(HookedStore(disk, fails), retention=TWO) as publisher:
        publisher.publish(weights(1.0))
        publisher.publish(weights(2.0))
        with pytest.raises(StoreUnavailable):
            publisher.publish(weights(3.0), background=True).result()
    assert numbers(disk) == [1, 2]


def test_an_attempt_that_a_newer_one_has_fenced_collects_no_more(disk, monkeypatch):
    """Its policy is not the one that counts now, and what waits for its grace time would wake it for ever."""
    monkeypatch.setattr("ckptsync.keeper.MARGIN", 0.05)
    with Publisher(disk, retention=TWO) as old:
        old.publish(weights(0.0))
        with Publisher(disk) as new:
            for step in range(1, 5):
                new.publish(weights(step))
            old._ledger._keeper.wake()
    assert numbers(disk) == [1, 2, 3, 4, 5]


def test_a_policy_that_is_no_policy_is_refused(disk):
    with pytest.raises(InvalidInput, match="retention=5"):
        Publisher(disk, retention=5)


def publish_on_ranks(rank: int, root: str) -> list[str]:
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder), retention=Retention(keep_last=2)) as publisher:
        for _ in range(4):
            publisher.publish(shard(TinyModel()))
    return [path for operation, path in recorder.changes() if operation == "delete" and "manifests" in path]


@pytest.mark.distributed
@pytest.mark.slow
def test_case_30_one_of_several_ranks_deletes(tmp_path):
    deleted = returned(run_ranks(2, publish_on_ranks, str(tmp_path)))
    assert sorted(deleted[0]) == [f"manifests/e0001-v0000000{n}.json" for n in (1, 2)]
    assert deleted[1:] == [[]]
    assert numbers(LocalStore(str(tmp_path))) == [3, 4]
