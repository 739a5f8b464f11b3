"""The stage: complete and verified or nothing, once per host, resumable, private."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckptsync.canonical import canonical
from ckptsync.channel import Channel
from ckptsync.copies import export_version as export
from ckptsync.digest import sha256
from ckptsync.errors import BadShard, CkptSyncError, StoreDenied, StoreFull
from ckptsync.layout import SELF_COPY, manifest_path
from ckptsync.manifest import decode
from ckptsync.store import LocalStore
from ckptsync.testing.hooks import Failing, HookedStore, Recorder, matching
from watchers import fetch as fetching
from watchers.stage import MissingFile, Stage

from .actions import SHARD, flip, shard_of, zero_tail
from .conftest import CountingStore, staged_folders
from .publish import TestPublisher

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_a_staged_folder_holds_exactly_the_listed_files_and_the_manifest(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    manifest = publisher.publish()
    version = Stage(folder).stage(Channel.open(root), manifest)
    assert sorted(os.listdir(version.folder)) == sorted([SELF_COPY, *(name for name, _ in manifest.files())])
    for name, entry in manifest.files():
        with (
            open(shard_of(root, manifest, name), "rb") as ours,
            open(f"{version.folder}/{name}", "rb") as theirs,
        ):
            assert ours.read() == theirs.read()
        assert os.path.getsize(f"{version.folder}/{name}") == entry.size


def test_a_version_by_an_older_or_newer_release_keeps_its_own_manifest_wherever_it_is_copied(
    root: str, publisher: TestPublisher, folder: str, tmp_path: Path
) -> None:
    manifest = publisher.publish()
    body = json.loads(manifest.encoded)
    del body["manifest_digest"], body["trainer_state"]
    stored = canonical({**body, "manifest_digest": sha256(canonical({**body, "colour": "blue"})), "colour": "blue"})
    os.remove(f"{root}/{manifest_path(manifest.id)}")
    Path(root, manifest_path(manifest.id)).write_bytes(stored)
    channel = Channel.open(root)
    read = channel.manifest(manifest.id)
    staged = Stage(folder).stage(channel, read)
    export(channel, read, str(tmp_path / "copy"))
    for copy in (staged.folder, str(tmp_path / "copy")):
        data = Path(copy, SELF_COPY).read_bytes()
        assert data == stored
        assert decode(data).manifest_digest == read.manifest_digest


def test_the_stage_is_private(root: str, publisher: TestPublisher, folder: str) -> None:
    version = Stage(folder).stage(Channel.open(root), publisher.publish())
    assert stat.S_IMODE(os.stat(os.path.dirname(version.folder)).st_mode) == 0o700
    assert {stat.S_IMODE(os.stat(f"{version.folder}/{name}").st_mode) for name in os.listdir(version.folder)} == {0o600}


def test_progress_counts_every_byte_once_and_nothing_for_what_is_here(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    manifest, seen = publisher.publish(), []
    Stage(folder).stage(Channel.open(root), manifest, seen.append)
    assert sum(seen) == manifest.nbytes
    Stage(folder).stage(Channel.open(root), manifest, seen.append)
    assert sum(seen) == manifest.nbytes


def test_files_that_are_here_already_are_not_read_again(
    root: str, publisher: TestPublisher, folder: str, counting_store: CountingStore
) -> None:
    manifest = publisher.publish()
    shard = shard_of(root, manifest)
    os.rename(shard, shard + ".late")
    with pytest.raises(MissingFile):
        Stage(folder).stage(Channel.open(counting_store), manifest)
    before = counting_store.read
    os.rename(shard + ".late", shard)
    Stage(folder).stage(Channel.open(counting_store), manifest)
    sizes = {name: entry.size for name, entry in manifest.files()}
    assert before > 0
    assert counting_store.read - before <= manifest.nbytes - sizes["model-00001-of-00002.safetensors"]


def _stage_and_die(root: str, folder: str, chunk: int, at: int) -> None:
    fetching.CHUNK = chunk
    channel, seen = Channel.open(root), 0

    def progress(count: int) -> None:
        nonlocal seen
        seen += count
        if seen >= at:
            os.kill(os.getpid(), signal.SIGKILL)

    Stage(folder).stage(channel, channel.latest(), progress)


@pytest.mark.parametrize("percent", [1, 40, 75, 100])
def test_a_killed_stage_is_resumed_file_by_file(
    root: str, publisher: TestPublisher, folder: str, counting_store: CountingStore, percent: int
) -> None:
    manifest = publisher.publish()
    at = manifest.nbytes * percent // 100
    process = multiprocessing.get_context("spawn").Process(target=_stage_and_die, args=(root, folder, 100, at))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    version = Stage(folder).stage(Channel.open(counting_store), manifest)
    assert sorted(os.listdir(version.folder)) == sorted([SELF_COPY, *(name for name, _ in manifest.files())])
    assert (counting_store.read < manifest.nbytes) == (percent > 50)


@pytest.mark.parametrize("trust", ["journal gone", "other boot"])
def test_without_a_journal_to_believe_local_files_are_digested_and_the_store_is_not_read(
    root: str, publisher: TestPublisher, folder: str, counting_store: CountingStore, trust: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    manifest = publisher.publish()
    version = Stage(folder).stage(Channel.open(root), manifest)
    damaged = f"{version.folder}/{SHARD}"
    zero_tail(damaged)  # what a power cut may leave
    if trust == "other boot":
        monkeypatch.setattr("watchers.journal.boot_id", lambda: "another")
    else:
        base, name = os.path.split(version.folder)
        os.unlink(f"{base}/.{name}.journal")
    again = Stage(folder).stage(Channel.open(counting_store), manifest)
    assert counting_store.read == os.path.getsize(damaged)
    with open(f"{again.folder}/{SHARD}", "rb") as ours, open(shard_of(root, manifest), "rb") as theirs:
        assert ours.read() == theirs.read()


def test_a_file_that_was_changed_in_the_stage_is_not_believed(
    root: str, publisher: TestPublisher, folder: str, counting_store: CountingStore
) -> None:
    manifest = publisher.publish()
    version = Stage(folder).stage(Channel.open(root), manifest)
    flip(f"{version.folder}/{SHARD}")
    Stage(folder).stage(Channel.open(counting_store), manifest)
    assert counting_store.read == os.path.getsize(shard_of(root, manifest))


def test_eight_engines_of_one_process_read_the_store_once(
    root: str, publisher: TestPublisher, folder: str, counting_store: CountingStore
) -> None:
    manifest, gate = publisher.publish(), threading.Barrier(8)

    def stage(_: int) -> str:
        gate.wait(60)
        return Stage(folder).stage(Channel.open(counting_store), manifest).folder

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(stage, range(8)))
    assert len(set(folders)) == 1
    assert counting_store.read == manifest.nbytes


def test_versions_in_use_stay_and_the_newest_besides(root: str, publisher: TestPublisher, folder: str) -> None:
    channel, stage, other = Channel.open(root), Stage(folder, keep=2), Stage(folder, keep=2)
    first = other.stage(channel, publisher.publish())
    for _ in range(4):
        stage.release(stage.stage(channel, publisher.publish()))
    numbers = [name.split("-")[1] for name in staged_folders(folder)]
    assert numbers == ["v00000001", "v00000004", "v00000005"]
    other.release(first)
    stage.evict(first.manifest.channel_id, 2)
    assert [name.split("-")[1] for name in staged_folders(folder)] == ["v00000004", "v00000005"]


def test_of_two_that_evict_one_version_the_second_finds_it_gone_and_goes_on(
    root: str, publisher: TestPublisher, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, other = Stage(folder), Stage(folder)
    version = stage.stage(Channel.open(root), publisher.publish())
    stage.release(version)
    listed = os.listdir

    def listed_before_the_other_evicts(path: str) -> list[str]:
        found = listed(path)
        monkeypatch.undo()
        other.evict(version.manifest.channel_id, 0)
        return found

    monkeypatch.setattr(os, "listdir", listed_before_the_other_evicts)
    stage.evict(version.manifest.channel_id, 0)
    assert staged_folders(folder) == []


def test_a_dead_process_holds_nothing(root: str, publisher: TestPublisher, folder: str) -> None:
    manifest = publisher.publish()
    process = multiprocessing.get_context("spawn").Process(target=_stage_and_die, args=(root, folder, 100, 1))
    process.start()
    process.join(60)
    stage = Stage(folder)
    stage.evict(manifest.channel_id, 0)
    assert staged_folders(folder) == []


def test_a_full_stage_is_told_before_any_byte_is_read(
    root: str,
    publisher: TestPublisher,
    folder: str,
    counting_store: CountingStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = publisher.publish()
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("watchers.stage.shutil.disk_usage", lambda _: usage)
    with pytest.raises(StoreFull, match=r"1\.0 KB \(1000 bytes\) free"):
        Stage(folder).stage(Channel.open(counting_store), manifest)
    assert counting_store.read == 0


def test_a_stage_that_runs_full_meanwhile_is_store_full(
    root: str, publisher: TestPublisher, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publisher.publish()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("watchers.fetch.os.pwrite", full)
    with pytest.raises(StoreFull, match="No space left"):
        Stage(folder).stage(Channel.open(root), manifest)


def test_a_folder_that_somebody_else_put_there_is_not_used(
    root: str, publisher: TestPublisher, folder: str, tmp_path: Any
) -> None:
    manifest = publisher.publish()
    os.makedirs(folder)
    os.symlink(tmp_path, os.path.join(folder, manifest.channel_id))
    with pytest.raises(StoreDenied, match="not a folder of ours"):
        Stage(folder).stage(Channel.open(root), manifest)


def test_the_version_is_leased_while_it_is_read_and_no_longer(root: str, publisher: TestPublisher, folder: str) -> None:
    recorder = Recorder()
    channel = Channel.open(HookedStore(LocalStore(root), recorder))
    Stage(folder).stage(channel, publisher.publish(), reader="me")
    operations = [(op, path.split("/")[0]) for op, path in recorder.seen if op in {"open", "write", "delete"}]
    assert operations[:2] == [("open", "channel.json"), ("write", "leases")]
    assert ("open", "data") in operations
    assert operations[-1] == ("delete", "leases")


def test_a_store_that_cannot_be_written_is_read_without_a_lease(
    root: str, publisher: TestPublisher, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    denied = Failing(lambda: StoreDenied("read-only"), matching("write", "delete"))
    stage, channel = Stage(folder), Channel.open(HookedStore(LocalStore(root), denied))
    for _ in range(2):
        stage.stage(channel, publisher.publish(), reader="me")
    assert len([r for r in caplog.records if "no lease can be written" in r.message]) == 1


def test_no_thread_and_no_descriptor_is_left_after_a_failure(root: str, publisher: TestPublisher, folder: str) -> None:
    manifest = publisher.publish()
    flip(shard_of(root, manifest))
    stage, channel = Stage(folder), Channel.open(root)
    with pytest.raises(BadShard):
        stage.stage(channel, manifest)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CkptSyncError):
            stage.stage(channel, manifest)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptsync-stage")]
