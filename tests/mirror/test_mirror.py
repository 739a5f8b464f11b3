"""What a mirror copies, in which order, what it leaves out, and which destinations it refuses."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time

import pytest

from ckptsync import Channel, Mirror, Retention
from ckptsync.errors import (
    BadManifest,
    ChannelEmpty,
    InvalidInput,
    IsMirror,
    NotAMirror,
    StoreDenied,
    StoreFull,
    StoreUnavailable,
)
from ckptsync.layout import MIRROR, manifest_path
from ckptsync.rollback import roll_back
from ckptsync.store import LocalStore
from ckptsync.store.base import read_bytes
from ckptsync.testing.hooks import Failing, HookedStore, Recorder, matching
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from tests.mirror.channels import SHARD, Trainer, bytes_of, content, numbers
from tests.waiting import until


@pytest.fixture
def source(tmp_path) -> LocalStore:
    return LocalStore(str(tmp_path / "source"))


@pytest.fixture
def target(tmp_path) -> LocalStore:
    return LocalStore(str(tmp_path / "target"))


def keep(count: int) -> Retention:
    return Retention(keep_last=count, grace=0.0)


def test_a_mirror_of_a_mirror_is_byte_for_byte_the_same_channel(all_kinds, tmp_path):
    roots = [all_kinds, LocalStore(str(tmp_path / "second")), LocalStore(str(tmp_path / "third"))]
    for source, target in itertools.pairwise(roots):
        assert len(Mirror(source, target).run().copied) == 7
    assert bytes_of(roots[2]) == bytes_of(roots[0])
    last = Channel.open(roots[2])
    assert all(verify_version(last, version).ok for version in last.committed())
    assert last.poll() == VersionId(3, 7)
    assert read_bytes(roots[2], "head.json", 9999) == read_bytes(roots[0], "head.json", 9999)


def test_claims_and_data_are_there_before_the_manifest_and_the_head_after_it(source, target):
    Trainer(source).publish(1)
    seen = Recorder()
    Mirror(source, HookedStore(target, seen)).run()
    done = [path for operation, path in seen.seen if operation in ("commit", "create")]
    assert done[:2] == [MIRROR, "channel.json"]
    of_version = [path.rpartition("/")[2] for path in done if "e0001" in path or path == "head.json"]
    assert of_version == [SHARD, "ckptsync.json", "e0001.json", "e0001-v00000001.json", "head.json"]


def test_what_is_there_and_right_is_not_read_from_the_source_again(source, target):
    Trainer(source).publish(1, 2)
    full = Failing(lambda: StoreDenied("no"), matching("create", suffix="e0001-v00000002.json"))
    with pytest.raises(StoreDenied):
        Mirror(source, HookedStore(target, full)).run()
    read = Recorder()
    assert Mirror(HookedStore(source, read), target).run().nbytes == 0
    assert not [path for operation, path in read.seen if operation == "open" and SHARD in path]
    assert bytes_of(target) == bytes_of(source)


def test_a_file_that_was_damaged_at_the_destination_is_copied_again(source, target):
    Trainer(source).publish(1)
    with pytest.raises(StoreDenied):
        Mirror(source, HookedStore(target, Failing(lambda: StoreDenied("no"), matching("create", part="manif")))).run()
    path = next(entry.path for entry in target.list("data") if SHARD in entry.path)
    with open(os.path.join(target.url, path), "r+b") as file:
        file.write(b"damage")
    assert Mirror(source, target).run().nbytes == len(content(1))
    assert bytes_of(target) == bytes_of(source)


def test_the_version_is_leased_at_the_source_while_it_is_copied(source, target):
    Trainer(source).publish(1)
    held = []
    Mirror(source, target, progress=lambda *_: held.extend(e.path for e in source.list("leases"))).run()
    assert len(held) == 1
    assert not list(source.list("leases"))


def test_a_source_that_may_only_be_read_is_mirrored_without_a_lease(source, target, caplog):
    Trainer(source).publish(1, 2)
    refuse = Failing(lambda: StoreDenied("read only"), matching("write", "create", "delete"))
    assert Mirror(HookedStore(source, refuse), target).run().copied
    assert caplog.text.count("no lease can be written") == 1


def test_a_version_collected_in_mid_copy_is_passed_over_and_leaves_nothing(source, target, caplog):
    Trainer(source).publish(1, 2, 3)

    def collect(operation: str, path: str) -> None:
        if operation == "open" and "v00000002" in path and SHARD in path:
            source.delete(manifest_path(VersionId(1, 2)))
            source.delete(path)

    done = Mirror(HookedStore(source, collect), target).run()
    assert [version.number for version in done.copied] == [1, 3]
    assert "e1-v2 is not mirrored" in caplog.text
    (line,) = [record for record in caplog.records if "is not mirrored" in record.message]
    assert (line.version, line.epoch, line.channel, line.target) == ("e1-v2", 1, source.url, target.url)
    assert not [entry.path for entry in target.list("") if "v00000002" in entry.path]


def test_a_file_damaged_at_the_source_never_appears_at_the_destination(source, target):
    Trainer(source).publish(1, 2, 3)
    path = next(entry.path for entry in source.list("data") if "v00000002" in entry.path and SHARD in entry.path)
    with open(os.path.join(source.url, path), "r+b") as file:
        file.write(b"damage")
    done = Mirror(source, target).run()
    assert numbers(target) == [1, 3]
    assert "differs" in done.skipped[VersionId(1, 2)]
    assert not [entry.path for entry in target.list("data") if "v00000002" in entry.path]


def test_a_delta_waits_for_its_bases_and_brings_them_along(source, target):
    trainer = Trainer(source)
    trainer.publish(1)
    for number in (2, 3):
        trainer.publish_delta(number)
    trainer.publish(4)
    assert Mirror(source, target, kinds=("delta",), retention=keep(3)).run().copied[0] == VersionId(1, 1)
    assert numbers(target) == [1, 2, 3]
    os.unlink(os.path.join(source.url, manifest_path(VersionId(1, 1))))
    other = LocalStore(target.url + "2")
    done = Mirror(source, other).run()
    assert numbers(other) == [4]
    assert set(done.skipped) == {VersionId(1, 2), VersionId(1, 3)}


def test_a_mirror_keeps_what_its_own_retention_says_and_brings_nothing_back(source, target):
    trainer = Trainer(source)
    trainer.publish(1, 2, 3, 4)
    mirror = Mirror(source, target, retention=keep(2))
    assert [version.number for version in mirror.run().copied] == [3, 4]
    trainer.publish(5)
    assert [version.number for version in mirror.run().copied] == [5]
    assert mirror.run().copied == ()
    assert (numbers(source), numbers(target)) == ([1, 2, 3, 4, 5], [4, 5])
    assert not Mirror(source, target).run().copied


class Small(HookedStore):
    """Has room for the shards of so many versions."""

    def __init__(self, store, versions):
        super().__init__(store)
        self._versions = versions

    def write(self, path):
        if path.endswith(SHARD) and sum(entry.path.endswith(SHARD) for entry in self.list("data")) >= self._versions:
            raise StoreFull(f"no space left on {self.url}")
        return super().write(path)


def test_a_mirror_that_ran_full_of_what_its_retention_lets_go_has_room_once_their_grace_is_over(source, target):
    trainer = Trainer(source)
    trainer.publish(1, 2, 3, 4)
    Mirror(source, target).run()
    trainer.publish(5)
    mirror = Mirror(source, Small(target, 4), retention=keep(2))
    with pytest.raises(StoreFull):
        mirror.run()
    assert numbers(target) == [3, 4]
    for entry in target.list("collected"):
        os.utime(os.path.join(target.url, entry.path), (0, time.time() - 120))
    with pytest.raises(StoreFull):
        mirror.run()  # their data go
    assert mirror.run().copied == (VersionId(1, 5),)


def test_a_pass_that_new_versions_keep_going_collects_meanwhile(source, target, monkeypatch):
    monkeypatch.setattr("ckptsync.mirror.mirror.COLLECT_SECONDS", -1.0)
    trainer, there = Trainer(source), []
    trainer.publish(1)

    def copied(manifest):
        there.append(numbers(target))
        if manifest.number < 6:
            trainer.publish(manifest.number + 1)

    Mirror(source, target, retention=keep(2), on_version=copied).run()
    assert there == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]


def test_a_rollback_to_what_the_mirror_has_collected_brings_it_back_with_its_data(source, target):
    trainer = Trainer(source)
    trainer.publish(1, 2)
    mirror = Mirror(source, target, retention=Retention(keep_last=2, grace=3600.0))
    mirror.run()
    trainer.publish(3, 4)
    assert [version.number for version in mirror.run().collected.versions] == [2, 1]
    assert [entry.path for entry in target.list("collected")]
    channel = Channel.open(source)
    rolled = roll_back(channel, channel.resolve("1"))
    assert mirror.run().copied == (VersionId(1, 1), rolled.id)
    assert numbers(target) == [1, 4, 5]
    assert not list(target.list("leases"))
    folder = Channel.open(target).manifest(rolled.id).folder
    assert read_bytes(target, f"{folder}/{SHARD}", 1 << 20) == content(1)


def test_a_resume_to_an_earlier_version_is_news_at_the_mirror_before_its_first_version(source, target):
    Trainer(source).publish(1, 2, 3)
    Mirror(source, target).run()
    reader = Channel.open(target)
    assert reader.poll() == VersionId(1, 3)
    Trainer(source, resumed_from=VersionId(1, 2))
    Mirror(source, target).run()
    assert reader.poll() == VersionId(1, 2)


def test_a_follower_brings_each_new_version_and_outlives_an_absent_source(source, target, caplog):
    stop, down = threading.Event(), threading.Event()

    def fail(operation: str, path: str) -> None:
        if down.is_set():
            raise StoreDenied("the share is away")

    mirror = Mirror(HookedStore(source, fail), target)
    thread = threading.Thread(target=mirror.follow, args=(stop,), kwargs={"poll": 0.01})
    thread.start()
    try:
        trainer, reader = Trainer(source), Channel.open(target)
        trainer.publish(1)
        until(lambda: reader.poll() == VersionId(1, 1))
        down.set()
        until(lambda: "mirroring waits" in caplog.text)
        trainer.publish(2, 3)
        down.clear()
        until(lambda: reader.poll() == VersionId(1, 3))
    finally:
        stop.set()
        thread.join()
    assert bytes_of(target) == bytes_of(source)


@pytest.mark.parametrize("at_destination", ["another channel", "a publisher of its own", "versions without a channel"])
def test_a_destination_that_is_no_mirror_of_the_source_is_refused_untouched(source, target, at_destination):
    Trainer(source).publish(1)
    if at_destination == "a publisher of its own":
        Mirror(source, target).run()
        target.delete(MIRROR)  # what the remedy of IsMirror says
    Trainer(target).publish(2)
    if at_destination == "versions without a channel":
        target.delete("channel.json")
    before = bytes_of(target)
    with pytest.raises(NotAMirror):
        Mirror(source, target).run()
    assert bytes_of(target) == before


def test_an_epoch_claimed_at_the_destination_by_an_older_release_ends_the_mirroring(source, target):
    trainer = Trainer(source)
    trainer.publish(1)
    Mirror(source, target).run()
    with open(os.path.join(target.url, "epochs/e0002.json"), "w") as file:
        file.write("{}")
    with pytest.raises(NotAMirror, match="epoch 2"):
        Mirror(source, target).run()
    Trainer(source).publish(2)
    with pytest.raises(NotAMirror, match=r"e0002.json is not what"):
        Mirror(source, target).run()
    assert numbers(target) == [1]


def test_nobody_publishes_to_a_mirror(source, target):
    Trainer(source).publish(1)
    Mirror(source, target).run()
    with pytest.raises(IsMirror, match="publish to its source"):
        Trainer(target)


def test_mirrors_in_a_circle_are_noticed_however_long_it_is(source, target, tmp_path):
    third, fourth = (LocalStore(str(tmp_path / name)) for name in ("third", "fourth"))
    Trainer(source).publish(1)
    for origin, destination in ((source, target), (target, third), (third, fourth)):
        Mirror(origin, destination).run()
    for origin, destination in ((third, target), (fourth, target)):
        with pytest.raises(NotAMirror, match="is itself mirrored from"):
            Mirror(origin, destination).run()
    Trainer(source).publish(2)
    Mirror(source, fourth).run()
    assert numbers(fourth) == [1, 2], "another way that is no circle"


def test_a_source_that_was_copied_by_other_means_and_went_its_own_way_is_called_that(source, target, tmp_path):
    Trainer(source).publish(1)
    shutil.copytree(source.url, tmp_path / "fork")
    fork = LocalStore(str(tmp_path / "fork"))
    with pytest.raises(NotAMirror, match="as its source or as a copy made by other means"):
        Mirror(source, fork).run()
    Mirror(source, target).run()
    Trainer(source).publish(2)
    Mirror(source, target).run()
    Trainer(fork).publish(2)
    with pytest.raises(NotAMirror, match="the two have parted"):
        Mirror(fork, target).run()


def test_a_root_is_no_mirror_of_itself(source):
    Trainer(source).publish(1)
    with pytest.raises(NotAMirror):
        Mirror(source, source).run()


@pytest.mark.parametrize("inside", ["source/copy", ""])
def test_neither_root_lies_inside_the_other(source, inside):
    Trainer(source).publish(1)
    folder = os.path.join(os.path.dirname(source.url), inside)
    with pytest.raises(NotAMirror, match="is inside"):
        Mirror(source, LocalStore(folder.rstrip("/"))).run()


def test_a_folder_with_anything_else_in_it_becomes_no_mirror(source, target):
    Trainer(source).publish(1)
    os.makedirs(target.url, exist_ok=True)
    with open(os.path.join(target.url, "config.json"), "w") as file:
        file.write("{}")
    with pytest.raises(NotAMirror, match=r"holds config.json"):
        Mirror(source, target).run()
    assert os.listdir(target.url) == ["config.json"]


def test_a_manifest_of_another_channel_is_not_mirrored(source, target):
    Trainer(source).publish(1, channel_id="f" * 32)
    assert Mirror(source, target).run().skipped.keys() == {VersionId(1, 1)}
    with pytest.raises(BadManifest):
        Mirror(source, target)._manifest(VersionId(1, 1))


def test_a_rate_or_a_kind_that_cannot_be_meant_is_refused(source, target):
    for options in ({"rate": 0}, {"kinds": ("whole",)}, {"kinds": ()}):
        with pytest.raises(InvalidInput):
            Mirror(source, target, **options)


def test_a_source_that_comes_to_be_while_it_is_looked_at_is_mirrored(source, target):
    """Its record was not there at the first look and was at the second: an empty one was copied, and refused."""
    looks = 0

    def publish_after_the_first_look(operation: str, path: str) -> None:
        nonlocal looks
        if operation == "open" and path == "channel.json":
            looks += 1
            if looks == 2:
                Trainer(source).publish(1)

    mirror = Mirror(HookedStore(source, publish_after_the_first_look), target)
    with pytest.raises(ChannelEmpty):
        mirror.run()
    assert not list(target.list(""))
    assert mirror.run().copied == (VersionId(1, 1),)


def test_a_follower_that_is_told_to_end_breaks_off_the_file_and_a_later_run_goes_on(source, target):
    Trainer(source).publish(1, 2)
    stop = threading.Event()
    mirror = Mirror(source, target, progress=lambda *_: stop.set())
    mirror.follow(stop)
    assert stop.is_set()
    assert numbers(target) == [1]
    assert not list(source.list("leases"))
    assert Mirror(source, target).run().copied == (VersionId(1, 2),)


def test_a_follower_at_a_rate_that_will_take_hours_ends_when_it_is_told_to(source, target):
    Trainer(source).publish(1)
    stop = threading.Event()
    Mirror(source, target, rate=1, progress=lambda *_: stop.set()).follow(stop)
    assert stop.is_set()
    assert numbers(target) == []
    assert not list(source.list("leases"))
    assert not list(target.unfinished("data"))


def test_leases_go_on_after_the_store_was_away_for_a_moment(source, target):
    Trainer(source).publish(1, 2)
    away = Failing(lambda: StoreUnavailable("away"), matching("write", part="leases"), times=1)
    held: list[str] = []
    mirror = Mirror(
        HookedStore(source, away), target, progress=lambda *_: held.extend(e.path for e in source.list("leases"))
    )
    with pytest.raises(StoreUnavailable):
        mirror.run()
    mirror.run()
    assert len(held) == 2
