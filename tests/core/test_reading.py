"""Whoever reads a version keeps it from being collected meanwhile."""

from __future__ import annotations

import os

import pytest

from ckptsync.channel import Channel
from ckptsync.copies import export_version
from ckptsync.errors import StoreDenied, VersionGone
from ckptsync.holds import Lease, leases
from ckptsync.layout import collected_path
from ckptsync.manifest import Manifest
from ckptsync.reading import leased
from ckptsync.resume_search import offered
from ckptsync.store import LocalStore, put_bytes
from ckptsync.store.clock import StoreClock
from ckptsync.testing.hooks import Failing, HookedStore, matching
from ckptsync.verify import verify_version
from tests.waiting import until
from tests.watcher.publish import TestPublisher


@pytest.fixture
def disk(tmp_path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"))


@pytest.fixture
def manifest(disk) -> Manifest:
    return TestPublisher(disk.url).publish()


def held(disk: LocalStore) -> list[Lease]:
    return leases(disk, StoreClock.guess())


def test_a_version_is_leased_while_it_is_verified_exported_or_resumed_from(disk, manifest, tmp_path):
    channel, seen = Channel.open(disk), list[str]()

    def look(_: int = 0) -> None:
        (lease,) = held(disk)
        assert lease.version == manifest.id
        seen.append(lease.reader.split("-")[0])

    verify_version(channel, manifest.id, look)
    assert held(disk) == []
    export_version(channel, manifest, str(tmp_path / "copy"), look)
    assert held(disk) == []
    offers = offered(channel, "latest", wants_state=False)
    next(offers)
    look()
    offers.close()
    assert held(disk) == []
    assert list(dict.fromkeys(seen)) == ["verify", "export", "resume"]


def test_a_lease_is_renewed_while_the_version_is_read(disk, manifest, monkeypatch):
    monkeypatch.setattr("ckptsync.reading.LEASE_SECONDS", 0.03)
    with leased(Channel.open(disk), manifest.id, "test"):
        (first,) = os.scandir(os.path.join(disk.url, "leases"))
        began = first.stat().st_mtime_ns
        until(lambda: os.stat(first.path).st_mtime_ns > began)
    assert os.listdir(os.path.join(disk.url, "leases")) == []


def test_what_is_being_collected_is_not_read(disk, manifest):
    put_bytes(disk, collected_path(manifest.id), b"{}")
    with pytest.raises(VersionGone), leased(Channel.open(disk), manifest.id, "test"):
        pytest.fail("it was read")
    assert held(disk) == []


def test_a_store_that_may_only_be_read_is_read_without_a_lease_and_that_is_said(disk, manifest, caplog):
    read_only = Failing(lambda: StoreDenied("read-only"), matching("write", "create", "delete"))
    assert verify_version(Channel.open(HookedStore(disk, read_only)), manifest.id).ok
    assert "is read without a lease, retention may delete it meanwhile: read-only" in caplog.text
