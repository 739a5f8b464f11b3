"""What a host does to a trainer passes: a root that is not mounted for a while, no more threads."""

from __future__ import annotations

import os
import time

import pytest
import torch

from ckptsync.background import BackgroundPublish
from ckptsync.channel import Channel
from ckptsync.errors import StoreUnavailable
from ckptsync.keeper import Keeper
from ckptsync.publish import Publisher
from ckptsync.retention import Retention
from ckptsync.store import LocalStore
from ckptsync.sweep import sweep_debris
from ckptsync.testing.hooks import HookedStore
from tests.host import threads, unmounted
from tests.waiting import until


@pytest.fixture
def root(tmp_path) -> str:
    return str(tmp_path / "root")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), value)}


def labels(root: str) -> list[str]:
    return [version.label for version in Channel.open(root).versions()]


@pytest.mark.parametrize("background", [False, True])
def test_a_root_that_is_not_mounted_fences_nobody_and_nothing_is_left_under_the_mount(root, background) -> None:
    def publish(value: float) -> None:
        done = publisher.publish(weights(value), background=background)
        if background:
            done.result(60)

    with Publisher(root) as publisher:
        publish(1.0)
        with unmounted(root), pytest.raises(StoreUnavailable, match=r"holds no channel any more .* is it mounted\?"):
            publish(2.0)
        publish(3.0)
    assert labels(root) == ["e1-v1", "e1-v2"]
    assert os.listdir(f"{root}-under") == []


def test_retention_goes_on_after_the_root_was_not_mounted(root, monkeypatch) -> None:
    monkeypatch.setattr("ckptsync.keeper.PAUSE", 0.0)
    with Publisher(root) as publisher:
        publisher.publish(weights(0.0))
        keeper = Keeper(LocalStore(root), Retention(keep_last=2, grace=0.0), publisher._ledger.epoch)
        with unmounted(root):
            keeper.wake()
            until(lambda: "is it mounted?" in keeper._failed)
        for value in range(3):
            publisher.publish(weights(value))
        keeper.wake()
        until(lambda: labels(root) == ["e1-v3", "e1-v4"])
        keeper.close()


def test_a_sweep_takes_nothing_for_debris_where_the_mount_went_away_between_two_listings(root) -> None:
    with Publisher(root) as publisher:
        publisher.publish(weights(1.0))
    away = unmounted(root)

    def before(operation: str, path: str) -> None:
        if (operation, path) == ("list", "manifests") and not os.path.exists(f"{root}-away"):
            away.__enter__()

    old = time.time() - 10_000
    for folder, _, names in os.walk(f"{root}/data"):
        for name in names:
            os.utime(os.path.join(folder, name), (old, old))
    store = LocalStore(root)
    channel = Channel.open(HookedStore(store, before))
    epoch = Channel.open(root).claim_epoch("next")
    with pytest.raises(StoreUnavailable, match="is it mounted"):
        sweep_debris(channel, epoch)
    away.__exit__(None, None, None)
    assert labels(root) == ["e1-v1"]


def test_a_background_publish_without_a_thread_is_made_in_the_foreground(caplog) -> None:
    handle = BackgroundPublish()
    with threads(0):
        handle.start(lambda: "published")
    assert (handle.result(), handle.wait()) == ("published", True)
    assert "published in the foreground: this host gives no more threads" in caplog.text


def test_a_commit_stands_though_retention_gets_no_thread(root, caplog) -> None:
    with Publisher(root) as publisher:
        keeper = Keeper(LocalStore(root), Retention(keep_last=2, grace=0.0), publisher._ledger.epoch)
        with threads(0):
            keeper.wake()
        assert "nothing was collected: this host gives no more threads" in caplog.text
        keeper.close()
