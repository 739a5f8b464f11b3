"""What the stage refuses: bytes that are absent, wrong, or in the wrong place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.errors import BadShard, StoreDenied, VersionGone
from ckptsync.layout import SELF_COPY, manifest_path
from ckptsync.manifest import FileEntry, Manifest
from ckptsync.store import LocalStore
from ckptsync.store.base import put_bytes
from ckptsync.testing.hooks import Failing, HookedStore, matching
from watchers.fetch import DeniedFile
from watchers.stage import MissingFile, NotAFile, Stage

from .actions import SHARD, flip, shard_of, zero_tail
from .conftest import staged_folders
from .publish import TestPublisher

pytestmark = pytest.mark.usefixtures("small_chunks")


def append(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


DAMAGES: dict[str, tuple[Callable[[str], None], str]] = {
    "bit flip": (flip, "xxh3-128 is"),
    "case 2: truncated": (lambda path: os.truncate(path, os.path.getsize(path) - 1), "bytes on the store"),
    "case 86: emptied": (lambda path: os.truncate(path, 0), "0 bytes on the store"),
    "tail zeroed at equal size": (zero_tail, "xxh3-128 is"),
    "case 80: trailing byte": (append, "bytes on the store"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_never_staged_and_is_named(
    root: str, publisher: TestPublisher, folder: str, damage: str
) -> None:
    manifest = publisher.publish()
    harm, reason = DAMAGES[damage]
    harm(shard_of(root, manifest))
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
    os.unlink(shard_of(root, manifest))
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
    shard = shard_of(root, manifest)
    os.rename(shard, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", shard)
    with pytest.raises(NotAFile, match=f"{SHARD}.*symbolic link"):
        Stage(folder).stage(Channel.open(root), manifest)


def test_a_regular_file_that_may_not_be_read_is_denied_by_name_and_not_called_corrupt(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    denied = Failing(lambda: StoreDenied("permission denied"), matching("open", suffix=SHARD))
    with pytest.raises(DeniedFile, match="permission denied"):
        Stage(folder).stage(Channel.open(HookedStore(LocalStore(root), denied)), publisher.publish())


def test_a_store_that_denies_everything_says_nothing_about_the_version(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    """Credentials that ran out while a version was on its way."""
    manifest = publisher.publish()
    expired = Failing(lambda: StoreDenied("credentials expired"), matching("open", "list"), times=0)
    channel = Channel.open(HookedStore(LocalStore(root), expired))
    channel.channel_id  # noqa: B018 - read while that is still possible
    expired.times = 99
    with pytest.raises(StoreDenied, match="credentials expired") as caught:
        Stage(folder).stage(channel, manifest)
    assert not isinstance(caught.value, DeniedFile)


def test_case_86_a_folder_in_place_of_a_shard_is_a_missing_file(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    manifest = publisher.publish()
    os.unlink(shard_of(root, manifest))
    os.mkdir(shard_of(root, manifest))
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
    os.rename(shard_of(root, manifest, first), shard_of(root, manifest, "aside"))
    os.rename(shard_of(root, manifest, second), shard_of(root, manifest, first))
    os.rename(shard_of(root, manifest, "aside"), shard_of(root, manifest, second))
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
