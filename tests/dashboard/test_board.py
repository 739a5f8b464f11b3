"""What the page is told: counts against real comparisons, one look for many, and nothing written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.dashboard.board import Board, Page
from ckptsync.dashboard.changes import compared_change
from ckptsync.delta.policy import DeltaPolicy
from ckptsync.errors import InvalidInput, VersionNotFound
from ckptsync.publish import Publisher
from ckptsync.store import LocalStore, open_store
from ckptsync.store.base import Reader
from ckptsync.testing.hooks import HookedStore, Recorder
from ckptsync.version import VersionId
from tests.retention.channels import Trainer
from tests.servers.fixtures import S3Root


@pytest.fixture(scope="module")
def page(channel: Channel) -> Page:
    return Board(channel).look()


def test_what_a_delta_changed_is_counted_exactly_from_its_headers(channel, page):
    old, new = (channel.manifest(VersionId(1, number)) for number in (4, 5))
    counted, compared = page.changes["e1-v5"], compared_change(channel, old, new)
    assert (counted.how, counted.base, new.kind) == ("counted", "e1-v4", "delta")
    assert counted.layers == compared.layers
    assert 0 < counted.changed == compared.changed < counted.elements
    assert [layer.name for layer in counted.layers][-2:] == ["model.layers.11", "lm_head"]


def test_a_version_without_a_delta_is_bounded_by_its_digests_until_it_is_compared(channel):
    board = Board(channel)
    bound = board.look().changes["e3-v16"]
    assert (bound.how, bound.base) == ("digests", "e2-v15"), "a way back shares a delta against yet another version"
    exact = board.compare("e3-v16")
    assert exact.how == "compared"
    assert 0 < exact.changed < bound.changed
    assert board.look().changes["e3-v16"] == exact
    assert board.compare("e3-v16", "e1-v2").base == "e1-v2"
    assert board.look().changes["e3-v16"] == exact, "another pair's is not the version's own"


def test_the_first_version_has_nothing_to_be_compared_with(channel, page):
    assert "e1-v1" not in page.changes
    with pytest.raises(InvalidInput, match="no version before it"):
        Board(channel).compare("e1-v1")


def test_a_version_in_detail_and_one_that_is_not_there(channel):
    board = Board(channel)
    detail = board.detail("e1-v5")
    assert detail["run_id"] == "grpo-7b"
    assert '"reward"' in detail["metadata"]
    assert detail["deltas"][0]["base"] == "e1-v4"
    assert any(file["path"].startswith("delta/") for file in detail["files"])
    assert msgspec.json.decode(board.manifest("e1-v5"))["number"] == 5
    with pytest.raises(VersionNotFound):
        board.detail("e9-v9")


def test_the_history_of_a_reader_comes_from_its_receipt(page):
    reader = next(reader for reader in page.status.readers if reader.reader == "gpu-0")
    assert len(reader.history) > 10
    assert reader.history[-1].version == page.status.newest
    assert all(past.pause_seconds > 0 and past.at > past.created > 0 for past in reader.history)


def test_many_who_ask_share_one_look_and_changes_wait_for_their_turn(root, monkeypatch):
    recorder = Recorder()
    board = Board(Channel.open(HookedStore(LocalStore(str(root)), recorder)), every=3600.0)
    monkeypatch.setattr("ckptsync.dashboard.board.BUDGET", 0.0)
    first = board.page()
    assert msgspec.json.decode(first)["changes"] == {}
    recorder.seen.clear()
    assert board.page() is first
    assert recorder.seen == []
    assert board.look().changes
    assert recorder.changes() == [], "it only reads"


def test_a_channel_that_is_empty_or_damaged_has_a_page(tmp_path: Any):
    store = LocalStore(str(tmp_path))
    board = Board(Channel.open(store))
    assert (board.look().status.newest, board.look().changes) == (None, {})
    trainer = Trainer(Channel.create(store))
    trainer.publish(1, 2)
    (tmp_path / "manifests" / "e0001-v00000003.json").write_text("{")
    (tmp_path / "receipts").mkdir()
    (tmp_path / "receipts" / "r.json").write_text("{")
    found = board.look()
    assert found.changes["e1-v2"].how == "digests"
    assert "receipts/r.json" in found.status.problems[0]
    assert found.status.versions[-1].problem


def test_a_delta_whose_file_is_gone_is_bounded_not_an_error(tmp_path):
    trainer = Trainer(Channel.create(str(tmp_path)))
    trainer.publish(1)
    trainer.publish_deltas(2)
    assert Board(trainer.channel).look().changes["e1-v2"].how == "digests"


@pytest.mark.s3
def test_in_a_bucket_the_headers_of_a_delta_are_read_and_not_its_changes(s3_root: S3Root):
    store = open_store(s3_root.url, options=s3_root.options)
    weights = {f"model.layers.{layer}.weight": torch.randn(256, 256) for layer in range(20)}
    with Publisher(store, delta=DeltaPolicy()) as publisher:
        publisher.publish(weights)
        later = {name: weight + (torch.rand(256, 256) < 0.05) for name, weight in weights.items()}
        published = publisher.publish(later)
    read: list[int] = []

    class Counting(HookedStore):
        def open(self, path: str) -> Reader:
            return CountingReader(super().open(path), read) if "/delta/" in path else super().open(path)

    found = Board(Channel.open(Counting(store))).look().changes["e1-v2"]
    assert found.how == "counted"
    assert found.changed == sum(int((later[name] != weights[name]).sum()) for name in weights)
    assert 0 < sum(read) < published.manifest.deltas[0].nbytes / 10


@dataclass
class CountingReader:
    inner: Reader
    read: list[int]

    @property
    def size(self) -> int:
        return self.inner.size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self.inner.readinto(offset, buffer)
        self.read.append(len(buffer))

    def close(self) -> None:
        self.inner.close()
