"""A file in the making that a killed mirror left in a version that is complete: seen by all who look, and swept once it
is old."""

from __future__ import annotations

import os
import time

import pytest

from ckptsync import Channel, Mirror
from ckptsync.mirror import mirror as mirroring
from ckptsync.status import Observer
from ckptsync.store import LocalStore
from ckptsync.sweep import sweep_debris
from ckptsync.version import VersionId
from tests.mirror.channels import copy_of, source_of

HOUR = 3600.0
NAME = ".ckptsync-tmp.another-host.1.0123456789abcdef"


@pytest.fixture
def source(tmp_path) -> LocalStore:
    return source_of(tmp_path / "source", 1, 2)


@pytest.fixture
def target(source, tmp_path) -> LocalStore:
    return copy_of(source, tmp_path / "target")


def left_in(store: LocalStore, number: int, age: float) -> str:
    """A killed writer's file in a complete version, which it wrote to `age` seconds ago; its path."""
    path = os.path.join(store.url, Channel.open(store).manifest(VersionId(1, number)).folder, NAME)
    with open(path, "wb") as file:
        file.write(bytes(3000))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_status_and_doctor_agree_about_it(ckptsync, target, tmp_path, monkeypatch):
    left_in(target, 1, age=0)
    folder = Channel.open(target).manifest(VersionId(1, 1)).folder
    assert Observer(Channel.open(target)).look().debris == {folder: 3000}
    checks = ckptsync("doctor", target.url, "--stage", tmp_path / "stage", "--json").json["checks"]
    (debris,) = [check for check in checks if check["name"] == "debris"]
    assert (debris["status"], debris["detail"], debris["names"]) == ("warn", "1 unfinished attempt, 3.0 KB", [folder])
    monkeypatch.setenv("COLUMNS", "60")
    said = ckptsync("doctor", target.url, "--stage", tmp_path / "stage").out
    assert f"debris: {folder}" in said.splitlines(), "on one line, to be copied"


def test_the_next_mirror_and_gc_sweep_it_once_it_is_old_and_never_before(ckptsync, source, target):
    for sweep in (lambda: Mirror(source, target).run(), lambda: ckptsync("gc", target.url, "--keep-last", 2)):
        young, old = left_in(target, 1, age=HOUR / 2), left_in(target, 2, age=HOUR + 180)
        sweep()
        assert os.path.exists(young), "another mirror may be writing it"
        assert not os.path.exists(old)


def test_a_mirror_that_goes_on_for_weeks_sweeps_again(source, target, monkeypatch):
    mirror = Mirror(source, target)
    mirror.run()
    old = left_in(target, 2, age=2 * HOUR)
    mirror.run()
    assert os.path.exists(old), "not in every pass"
    monkeypatch.setattr(mirroring, "LOOK_AFTER_SECONDS", -1.0)
    mirror.run()
    assert not os.path.exists(old)


def test_a_trainer_that_goes_on_sweeps_it_too(source):
    old = left_in(source, 2, age=2 * HOUR)
    channel = Channel.open(source)
    assert sweep_debris(channel, channel.claim_epoch("later")).unfinished == 1
    assert not os.path.exists(old)


def test_of_a_writer_that_runs_on_this_host_it_is_left_however_old(source, target):
    path = left_in(target, 2, age=2 * HOUR)
    mine = os.path.join(os.path.dirname(path), f".ckptsync-tmp.{os.uname().nodename}.{os.getpid()}.0123456789abcdef")
    os.rename(path, mine)
    Mirror(source, target).run()
    assert os.path.exists(mine)
