"""A mirror that is killed, and stores that go away, at every kind of moment: what readers see, and what comes next."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from ckptsync import Channel, Mirror
from ckptsync.errors import StoreError, StoreUnavailable
from ckptsync.store import LocalStore, open_store
from ckptsync.store.base import Store
from ckptsync.testing.crashes import killed_at
from ckptsync.testing.hooks import Failing, HookedStore, matching
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from tests.mirror.channels import SHARD, Trainer, bytes_of
from tests.servers import seaweed
from tests.waiting import until


def check_whole(store: Store) -> int:
    """Every version that is there can be read, whatever it is made from; how many there are."""
    channel = Channel.open(store)
    versions = channel.committed()
    assert [report for version in versions if not (report := verify_version(channel, version)).ok] == []
    return len(versions)


def mirror(source: str, target: Store) -> None:
    Mirror(source, target).run()


def test_a_mirror_killed_again_and_again_leaves_whole_versions_and_gets_there(all_kinds, tmp_path):
    source, target = all_kinds.url, str(tmp_path / "target")
    kills = 0
    # Far enough to be somewhere else each time, and never so far that a run could copy it all.
    while killed_at(partial(mirror, source), target, 14 + 7 * (kills % 3), context=multiprocessing.get_context("fork")):
        kills += 1
        check_whole(LocalStore(target))
    check_whole(LocalStore(target))
    assert kills > 2
    assert bytes_of(LocalStore(target)) == bytes_of(LocalStore(source))


class Outage:
    """Kills the server before the `at`-th read or write of a file whose path begins with `part`."""

    def __init__(self, server: seaweed.S3Server, at: int, part: str) -> None:
        self.server, self.left, self.part = server, at, part

    def __call__(self, operation: str, path: str) -> None:
        if operation in ("open", "append", "create") and path.startswith(self.part):
            self.left -= 1
            if self.left == 0:
                self.server.kill()


@pytest.mark.s3
@pytest.mark.slow
def test_from_s3_to_a_folder_to_s3_with_cuts_in_the_middle_it_is_the_same_channel(all_kinds, tmp_path):
    server = seaweed.start(str(tmp_path / "server"))
    try:
        first, last = (open_store(f"s3://{server.bucket}/{name}", options=server.options) for name in ("first", "last"))
        # Soon tired of a server that is away; the others wait for one that was started again to find its volumes.
        hasty_first, hasty_last = (
            open_store(store.url, options={**server.options, "deadline": 0.5}) for store in (first, last)
        )
        middle = LocalStore(str(tmp_path / "middle"))
        Mirror(all_kinds, first).run()
        killed = start_mirror(first.url, middle.url, server)
        until(lambda: any(SHARD[:5] in entry.path for entry in middle.list("data")), what="the first data")
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        check_whole(middle)
        cut_off(lambda hook: Mirror(HookedStore(hasty_first, hook), middle), Outage(server, 3, "data"), middle)
        Mirror(first, middle).run()
        cut_off(lambda hook: Mirror(middle, HookedStore(hasty_last, hook)), Outage(server, 5, "data"), last)
        Mirror(middle, last).run()
        assert check_whole(last) == 7
        assert bytes_of(last) == bytes_of(middle) == bytes_of(all_kinds)
        assert Channel.open(last).poll() == Channel.open(first).poll()
    finally:
        server.kill()


def start_mirror(source: str, target: str, server: seaweed.S3Server) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckptsync.cli", "mirror", source, target, "--rate", "10K"]
    return subprocess.Popen(command, env={**os.environ, **server.environment}, start_new_session=True)


def cut_off(made, outage: Outage, target: Store) -> None:
    with pytest.raises(StoreError):
        made(outage).run()
    assert outage.left <= 0
    outage.server.launch()
    check_whole(target)


@pytest.mark.parametrize("landed", [False, True], ids=["lost", "landed"])
def test_a_commit_whose_answer_was_lost_is_told_by_reading_back(tmp_path, landed):
    source, target = LocalStore(str(tmp_path / "source")), LocalStore(str(tmp_path / "target"))
    Trainer(source).publish(1)
    lost = Failing(lambda: StoreUnavailable("no answer"), matching("create", part="manifests"), times=1)
    copy = Mirror(source, HookedStore(target, after=lost) if landed else HookedStore(target, lost))
    if not landed:
        with pytest.raises(StoreUnavailable):
            copy.run()
    assert copy.run().copied == (VersionId(1, 1),)
    assert bytes_of(target) == bytes_of(source)
