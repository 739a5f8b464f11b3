"""What a channel remembers, reads once and says: found by the mutation check (docs/design/0028)."""

import json
import os

import pytest

from ckptsync.channel import LIST_EVERY, Channel
from ckptsync.errors import VersionNotFound
from ckptsync.layout import SENT, receipt_path
from ckptsync.store import open_store
from ckptsync.store.base import put_bytes
from ckptsync.testing.hooks import HookedStore, Recorder
from ckptsync.version import VersionId

from .test_channel import publish


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


@pytest.mark.parametrize("torn", [b"{", b"[]", b'{"epoch": "x", "number": 1}', b'{"epoch": 1}'])
def test_what_a_reader_or_a_trainer_said_and_nobody_can_read_was_not_said(root, torn):
    channel = Channel.create(root)
    assert channel.newest_sent() is None
    channel.note_sent(VersionId(3, 7))
    assert channel.newest_sent() == VersionId(3, 7)
    put_bytes(channel.store, SENT, torn)
    assert channel.newest_sent() is None
    put_bytes(channel.store, receipt_path("engine-0"), torn[:2])
    assert channel.receipt("engine-0") == {}


def test_how_far_a_reader_is_behind_counts_what_is_live_and_complete_up_to_the_newest(root):
    channel = Channel.create(root)
    epoch = channel.claim_epoch("run")
    first, *_, newest, torn = (publish(channel, epoch, number) for number in range(1, 5))
    os.truncate(os.path.join(root, "manifests", f"{torn.stem}.json"), 5)
    reader = Channel.open(root)
    assert reader.lag(None) == 0, "nothing was looked for yet"
    assert reader.poll() == reader.newest == newest
    assert (reader.lag(None), reader.lag(first), reader.lag(newest), reader.lag(torn)) == (3, 2, 0, 0)


def test_claims_and_manifests_are_read_once_and_a_few_manifests_kept(root):
    channel = Channel.create(root)
    epoch = channel.claim_epoch("run")
    versions = [publish(channel, epoch, number) for number in range(1, 10)]
    recorder = Recorder()
    reader = Channel.open(HookedStore(open_store(root), recorder))
    for version in [*versions, *versions[1:]]:
        reader.manifest(version)
        reader.claims()
    opened = [path for what, path in recorder.seen if what == "open"]
    assert len(opened) == len(set(opened)) == len(versions) + 1
    reader.manifest(versions[0])
    assert recorder.seen[-1] == ("open", f"manifests/{versions[0].stem}.json"), "the ninth put out the first"


def test_a_version_that_goes_between_the_listing_and_the_read_hides_none_before_it(root):
    channel = Channel.create(root)
    epoch = channel.claim_epoch("run")
    publish(channel, epoch, 1)
    gone = publish(channel, epoch, 2)

    def collect(operation, path):
        if operation == "open" and path == f"manifests/{gone.stem}.json":
            channel.store.delete(path)

    assert Channel.open(HookedStore(open_store(root), collect)).latest().id == VersionId(1, 1)
    with pytest.raises(VersionNotFound, match=r"has no complete version e1-v2 \(manifests/e0001-v00000002.json\)$"):
        Channel.open(root).manifest(gone)


def test_a_manifest_that_is_wrong_in_another_way_is_warned_of_again(root, caplog):
    channel = Channel.create(root)
    version = publish(channel, channel.claim_epoch("run"), 1)
    path = os.path.join(root, "manifests", f"{version.stem}.json")
    reader = Channel.open(root)
    for size in (20, 20, 10):
        os.truncate(path, size)
        for _ in range(LIST_EVERY):
            reader.poll()
    assert [record.message.count("is passed over") for record in caplog.records] == [1, 1]


def test_a_version_that_is_named_in_full_is_read_without_a_listing(root):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    recorder = Recorder()
    Channel.open(HookedStore(open_store(root), recorder)).resolve("e1-v1")
    assert recorder.seen == [("open", "manifests/e0001-v00000001.json")]


def test_the_head_can_be_made_anew_where_no_claim_is_left(root):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    for name in ("epochs/e0001.json", "head.json"):
        os.remove(os.path.join(root, name))
    Channel.open(root).refresh_head()
    with open(os.path.join(root, "head.json")) as file:
        head = json.load(file)
    assert (head["epoch"], head["number"], head["claimed"]) == (1, 1, 1)
    assert head["length"] == os.path.getsize(os.path.join(root, "manifests", "e0001-v00000001.json"))
    assert head["manifest_digest"] == channel.latest().manifest_digest
