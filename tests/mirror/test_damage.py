"""What a destination lost comes back by another run; bytes that went wrong, by a repair."""

from __future__ import annotations

import os
import shutil

import pytest

from ckptsync import Channel, Mirror, Retention
from ckptsync.layout import manifest_path
from ckptsync.store import LocalStore
from ckptsync.testing.hooks import HookedStore, Recorder
from ckptsync.version import VersionId
from tests.mirror.channels import SHARD, Trainer, bytes_of, content, copy_of, numbers, source_of


@pytest.fixture
def source(tmp_path) -> LocalStore:
    return source_of(tmp_path / "source", 1, 2, 3)


@pytest.fixture
def target(source, tmp_path) -> LocalStore:
    return copy_of(source, tmp_path / "target")


def shard(store: LocalStore, number: int) -> str:
    return os.path.join(store.url, Channel.open(store).resolve(str(number)).folder, SHARD)


def flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.write(b"damage")


def test_missing_and_cut_files_come_back_by_a_run_that_reads_no_other(source, target):
    os.unlink(shard(target, 1))
    os.truncate(shard(target, 2), 10)
    read = Recorder()
    done = Mirror(HookedStore(source, read), target).run()
    assert (done.repaired, done.copied) == ((VersionId(1, 1), VersionId(1, 2)), ())
    assert done.nbytes == 2 * len(content(1))
    assert len([path for operation, path in read.seen if operation == "open" and SHARD in path]) == 2
    assert bytes_of(target) == bytes_of(source)
    assert Mirror(source, target).run().repaired == ()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("how", ["deleted", "torn"])
def test_a_manifest_that_was_lost_is_committed_again_over_the_data_that_are_there(source, target, number, how):
    path = os.path.join(target.url, manifest_path(VersionId(1, number)))
    os.unlink(path) if how == "deleted" else os.truncate(path, 40)
    done = Mirror(source, target).run()
    assert (done.copied, done.nbytes) == ((VersionId(1, number),), 0)
    assert bytes_of(target) == bytes_of(source)


def test_wrong_bytes_of_the_right_size_are_found_and_replaced_by_a_repair_alone(source, target):
    flip(shard(target, 2))
    assert Mirror(source, target).run().repaired == ()
    assert Mirror(source, target).run(repair=True).repaired == (VersionId(1, 2),)
    assert bytes_of(target) == bytes_of(source)


def test_a_version_gone_with_all_its_files_comes_back_by_a_repair_alone(source, target):
    shutil.rmtree(os.path.dirname(shard(target, 2)))
    target.delete(manifest_path(VersionId(1, 2)))
    Mirror(source, target).run()
    assert numbers(target) == [1, 3], "a collector may have ended it"
    assert Mirror(source, target).run(repair=True).copied == (VersionId(1, 2),)
    assert bytes_of(target) == bytes_of(source)


@pytest.mark.parametrize("grace", [0.0, 3600.0], ids=["with its data", "with its note"])
def test_what_the_destinations_retention_let_go_does_not_come_back(source, target, grace):
    keep = Retention(keep_last=2, grace=grace)
    for _ in range(2):  # the second takes the data
        Mirror(source, target, retention=keep).run()
    assert Mirror(source, target).run().copied == ()
    assert numbers(target) == [2, 3]


def test_what_is_collected_while_it_is_looked_at_is_not_taken_for_damage(source, target):
    seen = Recorder()

    def collect_once_its_manifest_was_read(operation: str, path: str) -> None:
        seen(operation, path)
        if path == "data" and ("open", manifest_path(VersionId(1, 1))) in seen.seen:
            target.delete(manifest_path(VersionId(1, 1)))
            shutil.rmtree(os.path.join(target.url, folder), ignore_errors=True)

    folder = Channel.open(target).resolve("1").folder
    done = Mirror(source, HookedStore(target, collect_once_its_manifest_was_read)).run()
    assert (done.repaired, done.skipped) == ((), {})
    assert not os.path.exists(os.path.join(target.url, folder))


@pytest.mark.parametrize("kinds", [("full", "delta"), ("delta",)])
def test_a_base_that_a_delta_needs_comes_back(tmp_path, kinds):
    source, target = LocalStore(str(tmp_path / "source")), LocalStore(str(tmp_path / "target"))
    trainer = Trainer(source)
    trainer.publish(1)
    trainer.publish_delta(2)
    Mirror(source, target, kinds=kinds).run()
    shutil.rmtree(os.path.dirname(shard(target, 1)))
    target.delete(manifest_path(VersionId(1, 1)))
    assert Mirror(source, target, kinds=kinds).run().copied == (VersionId(1, 1),)
    assert bytes_of(target) == bytes_of(source)


def test_damage_that_the_source_cannot_mend_is_said_and_nothing_of_it_is_touched(source, target, caplog):
    for number in (1, 2):
        os.truncate(shard(target, number), 10)
    source.delete(manifest_path(VersionId(1, 1)))
    flip(shard(source, 2))
    before = bytes_of(target)
    done = Mirror(source, target).run()
    assert done.skipped.keys() == {VersionId(1, 1), VersionId(1, 2)}
    assert "not to be had from" in done.skipped[VersionId(1, 1)]
    assert done.repaired == ()
    assert bytes_of(target) == before
