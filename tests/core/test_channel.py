import json
import logging
import multiprocessing
import os
import shutil
import time

import msgspec
import pytest

from ckptsync.channel import LIST_EVERY, Channel
from ckptsync.errors import (
    AlreadyExists,
    BadManifest,
    ChannelEmpty,
    Fenced,
    InvalidInput,
    StoreDenied,
    StoreUnavailable,
    UnsupportedFormat,
    VersionExists,
    VersionGone,
    VersionNotFound,
)
from ckptsync.store import open_store
from ckptsync.store.base import read_bytes
from ckptsync.testing.hooks import Failing, HookedStore, Recorder, matching
from ckptsync.version import VersionId

from .manifests import manifest


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def store(request, tmp_path):
    """The same rules on a folder and on a real S3 server."""
    if request.param == "disk":
        return open_store(str(tmp_path / "root"))
    root = request.getfixturevalue("s3_root")
    return open_store(root.url, options=root.options)


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


def publish(channel, epoch, number, **fields):
    fields.setdefault("nonce", f"{epoch.nonce[:8]}x{number}")
    row = {"channel_id": channel.channel_id, "run_id": epoch.run_id, **fields}
    return channel.commit(epoch, manifest(epoch.number, number, **row)).id


def test_a_version_exists_once_it_is_committed_and_not_before(store):
    channel, reader = Channel.create(store), Channel.open(store)
    epoch = channel.claim_epoch("run")
    with pytest.raises(ChannelEmpty, match=r"has no version yet: publish one, or check the root$"):
        reader.latest()
    assert reader.poll() is None
    publish(channel, epoch, 1)
    assert reader.poll() == reader.latest().id == VersionId(1, 1)
    assert reader.channel_id == channel.channel_id


def test_a_reader_may_come_first_and_writes_nothing(root):
    reader = Channel.open(root)
    assert reader.poll() is None
    assert reader.versions() == []
    with pytest.raises(ChannelEmpty):
        _ = reader.channel_id
    assert not os.path.exists(root)


def test_newest_is_by_number_not_by_text_name_or_clock(root):
    channel = Channel.create(root)
    epoch = channel.claim_epoch("run")
    for number in (99_999_999, 100_000_000):
        publish(channel, epoch, number)
    for name in os.listdir(os.path.join(root, "manifests")):
        os.utime(os.path.join(root, "manifests", name), (1e9, 1e9 if "100000000" in name else 2e9))
    assert Channel.open(root).poll() == VersionId(1, 100_000_000)


def test_case_52_foreign_names_in_the_folders_are_ignored(root):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    for name in ("v00000007.tmp", "v7-copy", ".nfs000", "e0009-v00000009.json.bak", "e0009-v00000009"):
        with open(os.path.join(root, "manifests", name), "w") as file:
            file.write("{}")
    os.makedirs(os.path.join(root, "manifests", "lost+found"))
    assert Channel.open(root).committed() == [VersionId(1, 1)]


def test_the_same_commit_again_is_a_retry_and_other_content_is_refused(store):
    channel = Channel.create(store)
    epoch = channel.claim_epoch("run")
    mine = manifest(epoch.number, 1, nonce="one")
    assert channel.commit(epoch, mine) == channel.commit(epoch, mine)
    again = channel.commit(epoch, manifest(epoch.number, 1, nonce="two"))
    assert again.nonce == "one", "same content: the version that is there"
    whole = (
        "^e1-v1 is already published by run run with other content; versions are immutable: "
        "publish under the next number$"
    )
    with pytest.raises(VersionExists, match=whole):
        channel.commit(epoch, manifest(epoch.number, 1, nonce="three", value=b"different"))


def test_another_versions_manifest_under_the_name_is_not_taken_for_a_retry_though_the_content_is_the_same(root):
    channel = Channel.create(root)
    epoch = channel.claim_epoch("run")
    first = publish(channel, epoch, 1)
    folder = os.path.join(root, "manifests")
    shutil.copy(os.path.join(folder, f"{first.stem}.json"), os.path.join(folder, "e0001-v00000002.json"))
    with pytest.raises(BadManifest, match="named e0001-v00000002 but the manifest says e0001-v00000001"):
        publish(channel, epoch, 2)


def test_a_manifest_that_is_gone_right_after_its_commit_is_not_committed(root):
    def lose(operation, path):
        if operation == "create" and path.startswith("manifests/"):
            channel.store.inner.delete(path)

    channel = Channel.create(HookedStore(open_store(root), after=lose))
    with pytest.raises(VersionNotFound, match="e1-v1 is not there after its commit"):
        publish(channel, channel.claim_epoch("run"), 1)


def test_a_newer_epoch_fences_the_older_publisher(store):
    old, new = Channel.create(store), Channel.create(store)
    first = old.claim_epoch("first")
    publish(old, first, 1)
    second = new.claim_epoch("second")
    assert second.next_number == 2
    with pytest.raises(Fenced, match=r"epoch 2 was claimed by .*run second.*must stop"):
        publish(old, first, 2)
    assert publish(new, second, 2) == VersionId(2, 2)


def test_case_46_of_two_claims_at_once_each_gets_its_own_epoch(root):
    Channel.create(root)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        numbers = pool.map(_claim, [(root, f"run{n}") for n in range(8)])
    assert sorted(numbers) == list(range(1, 9))


def _claim(job):
    return Channel.open(job[0]).claim_epoch(job[1]).number


def test_case_22_after_a_resume_readers_leave_the_dead_branch_at_once(store):
    channel, reader = Channel.create(store), Channel.open(store)
    first = channel.claim_epoch("first")
    for number in range(1, 10):
        publish(channel, first, number)
    assert reader.poll() == VersionId(1, 9)
    second = Channel.create(store).claim_epoch("second", resumed_from=VersionId(1, 5))
    assert reader.poll() == VersionId(1, 5)
    publish(channel, second, 6)
    assert reader.poll() == VersionId(2, 6)
    assert reader.resolve("7").id == VersionId(1, 7), "the dead branch is kept and can be asked for"


def test_numbers_start_at_one_and_go_on_from_where_the_trainer_resumed(root):
    channel = Channel.create(root)
    first = channel.claim_epoch("first")
    assert first.next_number == 1, "0 is kept for the base model"
    for number in (1, 2, 3):
        publish(channel, first, number)
    assert channel.claim_epoch("next").next_number == 4
    assert channel.claim_epoch("back", resumed_from=VersionId(1, 2)).next_number == 3


def test_case_13_the_number_of_a_torn_version_is_not_used_again(root):
    channel = Channel.create(root)
    epoch = channel.claim_epoch("first")
    publish(channel, epoch, 1)
    publish(channel, epoch, 2)
    os.truncate(os.path.join(root, "manifests", "e0001-v00000002.json"), 20)
    claimed = Channel.create(root).claim_epoch("second")
    assert (claimed.resumed_from, claimed.next_number) == (VersionId(1, 1), 3)


def test_resuming_from_a_version_that_is_not_there_claims_nothing(root):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    with pytest.raises(VersionNotFound):
        channel.claim_epoch("next", resumed_from=VersionId(1, 8))
    assert max(channel.claims()) == 1


def test_case_44_a_commit_whose_answer_was_lost_is_found_to_be_ours(root):
    inner = open_store(root)
    lost = _AnswerLost(inner, "manifests/")
    channel = Channel.create(lost)
    epoch = channel.claim_epoch("run")
    assert publish(channel, epoch, 1) == VersionId(1, 1)
    assert lost.lost == 1


def test_case_44_a_claim_whose_answer_was_lost_is_found_to_be_ours(root):
    lost = _AnswerLost(open_store(root), "epochs/")
    assert Channel.create(lost).claim_epoch("run").number == 1
    assert lost.lost == 1


class _AnswerLost(HookedStore):
    """The first create below `part` lands; the caller is told AlreadyExists, as an SDK's own retry would."""

    def __init__(self, inner, part, error=AlreadyExists):
        super().__init__(inner, lambda *_: None)
        self.part, self.error, self.lost = part, error, 0

    def create(self, path, data):
        self.inner.create(path, data)
        if self.part in path and not self.lost:
            self.lost += 1
            raise self.error("the answer was lost")


def test_case_44_after_a_timeout_a_read_decides_whether_it_was_committed(root):
    lost = _AnswerLost(open_store(root), "manifests/", StoreUnavailable)
    channel = Channel.create(lost)
    assert publish(channel, channel.claim_epoch("run"), 1) == VersionId(1, 1)
    never = HookedStore(
        open_store(root), Failing(lambda: StoreUnavailable("down"), matching("create", part="v00000002"))
    )
    channel = Channel.open(never)
    with pytest.raises(StoreUnavailable):
        publish(channel, channel.claim_epoch("again"), 2)
    assert Channel.open(root).committed() == [VersionId(1, 1)]


def test_case_44_after_a_timeout_a_read_decides_whether_an_epoch_was_claimed(root):
    lost = _AnswerLost(open_store(root), "epochs/", StoreUnavailable)
    assert Channel.create(lost).claim_epoch("run").number == 1
    never = HookedStore(open_store(root), Failing(lambda: StoreUnavailable("down"), matching("create", part="epochs/")))
    with pytest.raises(StoreUnavailable):
        Channel.open(never).claim_epoch("again")
    assert max(Channel.open(root).claims()) == 1


def test_a_store_where_both_writers_win_is_found_out_at_the_commit(root, caplog):
    """As on two FUSE mounts: the second create overwrites and says yes."""

    class BothWin(HookedStore):
        def create(self, path, data):
            self.inner.delete(path)
            self.inner.create(path, data)

    store = BothWin(open_store(root), lambda *_: None)
    channel = Channel.create(store)
    assert "does not enforce create-if-absent" in caplog.text
    epoch = channel.claim_epoch("one")
    publish(channel, epoch, 1)
    inner = open_store(root)
    inner.delete("epochs/e0001.json")
    inner.create("epochs/e0001.json", msgspec.json.encode(msgspec.structs.replace(epoch, nonce="other")))
    with pytest.raises(Fenced, match="no longer ours"):
        publish(channel, epoch, 2)


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_case_13_a_torn_manifest_is_passed_over_with_one_warning(root, caplog, keep):
    channel = Channel.create(root)
    epoch = channel.claim_epoch("run")
    publish(channel, epoch, 1)
    publish(channel, epoch, 2)
    path = os.path.join(root, "manifests", "e0001-v00000002.json")
    os.truncate(path, int(os.path.getsize(path) * keep))
    reader = Channel.open(root)
    assert [reader.poll() for _ in range(3 * LIST_EVERY)] == [VersionId(1, 1)] * (3 * LIST_EVERY)
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "manifests/e0001-v00000002.json" in warnings[0]


def test_a_torn_manifest_that_becomes_whole_is_found(root):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    path = os.path.join(root, "manifests", "e0001-v00000001.json")
    with open(path, "rb") as file:
        whole = file.read()
    os.truncate(path, 10)
    reader = Channel.open(root)
    assert reader.poll() is None
    with open(path, "wb") as file:
        file.write(whole)
    assert [reader.poll() for _ in range(LIST_EVERY)][-1] == VersionId(1, 1)


def test_versions_that_are_all_broken_are_not_mistaken_for_an_empty_channel(root):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    os.truncate(os.path.join(root, "manifests", "e0001-v00000001.json"), 5)
    with pytest.raises(BadManifest, match=r"holds versions, but none of them is complete and live$"):
        Channel.open(root).latest()


def test_a_manifest_of_another_format_is_named_and_passed_over(root, caplog):
    channel = Channel.create(root)
    epoch = channel.claim_epoch("run")
    publish(channel, epoch, 1)
    with open(os.path.join(root, "manifests", "e0001-v00000002.json"), "w") as file:
        json.dump({"format": 3, "epoch": 1, "number": 2}, file)
    reader = Channel.open(root)
    assert reader.poll() == VersionId(1, 1)
    assert "format 3 is not 1" in caplog.text
    with pytest.raises(UnsupportedFormat):
        reader.manifest(VersionId(1, 2))


@pytest.mark.parametrize("torn", [b"", b"{", b'{"epoch": "x"}', bytes(100_000), None])
def test_case_12_head_is_only_a_hint(root, torn):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    head = os.path.join(root, "head.json")
    if torn is None:
        os.remove(head)
    else:
        with open(head, "wb") as file:
            file.write(torn)
    assert Channel.open(root).poll() == VersionId(1, 1)


def test_a_head_that_was_never_written_delays_readers_and_hides_nothing(root, caplog):
    store = HookedStore(
        open_store(root), Failing(lambda: StoreDenied("read-only"), matching("write", suffix="head.json"))
    )
    channel = Channel.create(store)
    epoch = channel.claim_epoch("run")
    reader = Channel.open(root)
    publish(channel, epoch, 1)
    assert "readers find e1-v1 by listing" in caplog.text
    assert reader.poll() == VersionId(1, 1)
    publish(channel, epoch, 2)
    assert VersionId(1, 2) in [reader.poll() for _ in range(LIST_EVERY)]


def test_while_nothing_happens_a_poll_is_one_small_read(root):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    recorder = Recorder()
    reader = Channel.open(HookedStore(open_store(root), recorder))
    reader.poll()
    recorder.seen.clear()
    for _ in range(LIST_EVERY - 2):
        reader.poll()
    assert set(recorder.seen) == {("open", "head.json")}


@pytest.mark.parametrize("error", [StoreDenied("EACCES"), StoreUnavailable("EIO")])
def test_case_14_a_store_that_cannot_be_listed_is_not_an_empty_one(root, error):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    failing = HookedStore(open_store(root), Failing(lambda: error, matching("list")))
    with pytest.raises(type(error)):
        Channel.open(failing).poll()
    before = sorted(os.listdir(root))
    with pytest.raises(type(error)):
        Channel.open(failing).claim_epoch("run")
    assert sorted(os.listdir(root)) == before


def test_a_root_with_versions_and_no_channel_record_is_not_started_afresh(root):
    channel = Channel.create(root)
    publish(channel, channel.claim_epoch("run"), 1)
    os.remove(os.path.join(root, "channel.json"))
    with pytest.raises(BadManifest, match=r"holds versions but no channel\.json"):
        Channel.create(root)


def test_case_16_nothing_on_storage_names_where_it_was_written(tmp_path):
    here, there = str(tmp_path / "a"), str(tmp_path / "b")
    channel = Channel.create(here)
    publish(channel, channel.claim_epoch("run"), 1)
    os.rename(here, there)
    assert Channel.open(there).latest().id == VersionId(1, 1)
    for folder, _, names in os.walk(there):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                assert str(tmp_path).encode() not in file.read(), name


def test_a_version_that_was_collected_is_gone_and_not_merely_unknown(root):
    channel = Channel.create(root)
    version = publish(channel, channel.claim_epoch("run"), 1)
    channel.check_still_there(version)
    os.remove(os.path.join(root, "manifests", f"{version.stem}.json"))
    with pytest.raises(VersionGone, match=r"^e1-v1 was collected from .* in the meantime$"):
        channel.check_still_there(version)


@pytest.mark.parametrize(("text", "found"), [("latest", (2, 6)), ("6", (2, 6)), ("5", (1, 5)), ("e1-v6", (1, 6))])
def test_a_number_means_the_live_version_of_that_number(root, text, found):
    channel = Channel.create(root)
    first = channel.claim_epoch("first")
    for number in (5, 6):
        publish(channel, first, number)
    publish(channel, channel.claim_epoch("second", resumed_from=VersionId(1, 5)), 6)
    assert channel.resolve(text).id == VersionId(*found)


def test_a_reader_says_what_it_serves_and_what_it_reads(store):
    channel = Channel.create(store)
    version = publish(channel, channel.claim_epoch("run"), 1)
    channel.write_receipt("engine-0", {"version": version.label})
    channel.lease("engine-0", version, 60.0)
    names = {entry.path for folder in ("receipts", "leases") for entry in store.list(folder)}
    assert names == {"receipts/engine-0.json", "leases/engine-0.json"}
    said = json.loads(read_bytes(store, "leases/engine-0.json", 1000))
    assert 0 <= time.time() - said.pop("since") < 600
    assert said == {"reader": "engine-0", "epoch": 1, "number": 1, "seconds": 60.0}
    assert channel.receipt("engine-0") == {"reader": "engine-0", "version": "e1-v1"}
    channel.release("engine-0")
    assert list(store.list("leases")) == []
    with pytest.raises(InvalidInput):
        channel.write_receipt("../elsewhere", {})


def test_a_root_may_be_a_path(tmp_path):
    assert Channel.open(tmp_path / "run").store.url == str(tmp_path / "run")


@pytest.mark.parametrize("root", [None, 5, b"/nfs/run", ["/nfs/run"]])
def test_what_is_no_root_is_refused_at_once(root):
    with pytest.raises(InvalidInput, match="is no root"):
        Channel.open(root)
