"""The stage: complete and verified or nothing, once per host, resumable, private."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.errors import BadShard, CkptSyncError, StoreDenied, StoreFull, VersionGone
from ckptsync.layout import SELF_COPY, manifest_path
from ckptsync.manifest import FileEntry, Manifest
from ckptsync.store import LocalStore
from ckptsync.store.base import put_bytes
from tests.faults.store import Failing, HookedStore, Recorder, matching
from watchers import fetch as fetching
from watchers.stage import MissingFile, Stage

from .conftest import CountingStore, staged_folders
from .publish import TestPublisher

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Any) -> str:
    return str(tmp_path / "stage")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file of a few hundred bytes comes in many ranges."""
    monkeypatch.setattr(fetching, "CHUNK", 100)


def path_of(root: str, manifest: Manifest, name: str = SHARD) -> str:
    return os.path.join(root, manifest.folder, name)


def test_a_staged_folder_holds_exactly_the_listed_files_and_the_manifest(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    manifest = publisher.publish()
    version = Stage(folder).stage(Channel.open(root), manifest)
    assert sorted(os.listdir(version.folder)) == sorted([SELF_COPY, *(name for name, _ in manifest.files())])
    for name, entry in manifest.files():
        with (
            open(path_of(root, manifest, name), "rb") as ours,
            open(f"{version.folder}/{name}", "rb") as theirs,
        ):
            assert ours.read() == theirs.read()
        assert os.path.getsize(f"{version.folder}/{name}") == entry.size


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


def flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def zero_tail(path: str) -> None:
    size = os.path.getsize(path)
    os.truncate(path, size - 60)
    os.truncate(path, size)


def append(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


DAMAGES: dict[str, tuple[Callable[[str], None], str]] = {
    "bit flip": (flip, "xxh3-128 is"),
    "truncated": (lambda path: os.truncate(path, os.path.getsize(path) - 1), "bytes on the store"),
    "emptied": (lambda path: os.truncate(path, 0), "0 bytes on the store"),
    "tail zeroed at equal size": (zero_tail, "xxh3-128 is"),
    "case 80: trailing byte": (append, "bytes on the store"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_case_86_a_damaged_shard_is_never_staged_and_is_named(
    root: str, publisher: TestPublisher, folder: str, damage: str
) -> None:
    manifest = publisher.publish()
    harm, reason = DAMAGES[damage]
    harm(path_of(root, manifest))
    with pytest.raises(BadShard, match=f"{SHARD}.*{reason}"):
        Stage(folder).stage(Channel.open(root), manifest)
    (name,) = staged_folders(folder)
    left = os.listdir(os.path.join(folder, manifest.channel_id, name))
    assert SELF_COPY not in left
    assert not [file for file in left if file.startswith(SHARD)]


def test_case_78_a_missing_shard_is_named_while_the_manifest_is_there(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    manifest = publisher.publish()
    os.unlink(path_of(root, manifest))
    with pytest.raises(MissingFile, match=SHARD):
        Stage(folder).stage(Channel.open(root), manifest)


def test_case_29_a_version_that_was_collected_meanwhile_is_gone_not_corrupt(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    manifest = publisher.publish()
    store = LocalStore(root)
    store.delete(manifest_path(manifest.id))
    store.delete(f"{manifest.folder}/{SHARD}")
    with pytest.raises(VersionGone):
        Stage(folder).stage(Channel.open(root), manifest)


def test_case_85_a_shard_that_is_a_symbolic_link_is_refused(
    root: str, publisher: TestPublisher, folder: str, tmp_path: Any
) -> None:
    manifest = publisher.publish()
    shard = path_of(root, manifest)
    os.rename(shard, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", shard)
    with pytest.raises(StoreDenied, match=SHARD):
        Stage(folder).stage(Channel.open(root), manifest)


def test_case_86_a_folder_in_place_of_a_shard_is_a_missing_file(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    manifest = publisher.publish()
    os.unlink(path_of(root, manifest))
    os.mkdir(path_of(root, manifest))
    with pytest.raises(MissingFile, match=SHARD):
        Stage(folder).stage(Channel.open(root), manifest)


def test_case_81_stale_files_beside_the_shards_are_not_staged(root: str, publisher: TestPublisher, folder: str) -> None:
    manifest = publisher.publish()
    put_bytes(LocalStore(root), f"{manifest.folder}/model-00003-of-00002.safetensors", b"stale")
    version = Stage(folder).stage(Channel.open(root), manifest)
    assert "model-00003-of-00002.safetensors" not in os.listdir(version.folder)


def test_case_81_leftovers_in_the_stage_are_removed(root: str, publisher: TestPublisher, folder: str) -> None:
    manifest = publisher.publish()
    version = Stage(folder).stage(Channel.open(root), manifest)
    os.unlink(f"{version.folder}/{SELF_COPY}")
    with open(f"{version.folder}/model-00009-of-00009.safetensors", "wb") as file:
        file.write(b"stale")
    again = Stage(folder).stage(Channel.open(root), manifest)
    assert "model-00009-of-00009.safetensors" not in os.listdir(again.folder)


def test_case_82_a_shard_with_another_shards_tensor_in_it_is_refused(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    """Digests agree, since the manifest was made over these very bytes; only the header tells."""
    manifest = with_swapped_shards(publisher.publish())
    first, second = sorted(name for name, _ in manifest.files() if name.endswith(".safetensors"))
    os.rename(path_of(root, manifest, first), path_of(root, manifest, "aside"))
    os.rename(path_of(root, manifest, second), path_of(root, manifest, first))
    os.rename(path_of(root, manifest, "aside"), path_of(root, manifest, second))
    with pytest.raises(BadShard, match="model-0000"):
        Stage(folder).stage(Channel.open(root), manifest)


def with_swapped_shards(manifest: Manifest) -> Manifest:
    import msgspec

    track = manifest.tracks["model"]
    (a, b), others = (
        [f for f in track.files if f.name.endswith(".safetensors")],
        [f for f in track.files if not f.name.endswith(".safetensors")],
    )
    files = (
        FileEntry(name=a.name, size=b.size, digest=b.digest),
        FileEntry(name=b.name, size=a.size, digest=a.digest),
        *others,
    )
    return msgspec.structs.replace(manifest, tracks={"model": msgspec.structs.replace(track, files=files)})


def test_case_84_an_index_that_leads_outside_is_never_staged(root: str, publisher: TestPublisher, folder: str) -> None:
    index = json.dumps({"weight_map": {"norm.weight": "../../secret"}}).encode()
    manifest = publisher.publish(assets={"model.safetensors.index.json": index})
    with pytest.raises(BadShard, match=r"model.safetensors.index.json: tensor 'norm.weight'"):
        Stage(folder).stage(Channel.open(root), manifest)


def test_files_that_are_here_already_are_not_read_again(
    root: str, publisher: TestPublisher, folder: str, counting_store: CountingStore
) -> None:
    manifest = publisher.publish()
    shard = path_of(root, manifest)
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
    with open(f"{again.folder}/{SHARD}", "rb") as ours, open(path_of(root, manifest), "rb") as theirs:
        assert ours.read() == theirs.read()


def test_a_file_that_was_changed_in_the_stage_is_not_believed(
    root: str, publisher: TestPublisher, folder: str, counting_store: CountingStore
) -> None:
    manifest = publisher.publish()
    version = Stage(folder).stage(Channel.open(root), manifest)
    flip(f"{version.folder}/{SHARD}")
    Stage(folder).stage(Channel.open(counting_store), manifest)
    assert counting_store.read == os.path.getsize(path_of(root, manifest))


def test_eight_watchers_on_one_host_read_the_store_once(
    root: str, publisher: TestPublisher, folder: str, counting_store: CountingStore
) -> None:
    manifest, done = publisher.publish(), []
    gate = threading.Barrier(8)

    def engine() -> None:
        gate.wait()
        done.append(Stage(folder).stage(Channel.open(counting_store), manifest))

    threads = [threading.Thread(target=engine) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 8
    assert len({version.folder for version in done}) == 1
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
    with pytest.raises(StoreFull, match="1000 bytes free"):
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
    assert operations[0] == ("write", "leases")
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
    flip(path_of(root, manifest))
    stage, channel = Stage(folder), Channel.open(root)
    with pytest.raises(BadShard):
        stage.stage(channel, manifest)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CkptSyncError):
            stage.stage(channel, manifest)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("ckptsync-stage")]
