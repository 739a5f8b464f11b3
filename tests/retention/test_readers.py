"""A reader in mid-read and a collector at the same time."""

from __future__ import annotations

from ckptsync.errors import StoreDenied
from ckptsync.store import LocalStore
from ckptsync.testing.engines import FakeEngine
from ckptsync.testing.hooks import Failing, HookedStore, matching
from tests.watcher.publish import SCHEMA, TestPublisher
from watchers.watcher import Watcher

from .channels import collect, numbers


def watcher(store: object, tmp_path: object, **options: object) -> Watcher:
    return Watcher(store, FakeEngine(SCHEMA), stage=f"{tmp_path}/stage", poll=0.01, events=False, **options)


def test_case_29_a_version_that_is_being_read_is_leased_and_loaded_although_newer_ones_push_it_out(disk, tmp_path):
    publisher = TestPublisher(disk.url)
    publisher.publish()
    ended = []

    def in_mid_read(_: int) -> None:
        if not ended:
            for _ in range(3):
                publisher.publish()
            ended.extend(collect(disk).versions)

    reader = watcher(disk, tmp_path, follow="1", progress=in_mid_read)
    assert reader.step().state == "serving"
    assert [version.number for version in ended] == [2]
    assert numbers(disk) == [1, 3, 4]
    reader.close()


def test_case_29_a_reader_that_cannot_lease_is_told_that_its_version_is_gone_and_takes_the_newest(disk, tmp_path):
    publisher = TestPublisher(disk.url)
    doomed = publisher.publish()
    done = []

    def before_the_first_byte(operation: str, path: str) -> None:
        if operation == "open" and path.startswith(doomed.folder) and not done:
            done.append(path)
            for _ in range(2):
                publisher.publish()
            collect(LocalStore(disk.url))

    read_only = Failing(lambda: StoreDenied("read-only"), matching("write", "create", "delete"))

    def hook(operation: str, path: str) -> None:
        read_only(operation, path)
        before_the_first_byte(operation, path)

    receipts = []
    reader = watcher(HookedStore(disk, hook), tmp_path, on_receipt=receipts.append)
    for _ in range(2):
        reader.step()
    assert [(r.version, r.state, r.error and r.error["kind"]) for r in receipts] == [
        ("e1-v1", "refused", "version-gone"),
        ("e1-v3", "serving", None),
    ]
    reader.close()
