"""What a manifest may say of deltas, and what the version is as a full one."""

from __future__ import annotations

import msgspec
import pytest

from ckptsync.errors import BadManifest
from ckptsync.manifest import Base, FileEntry, Manifest, Parent, Track, content_digest, decode, seal
from ckptsync.manifest import TensorEntry as Tensor

SHARD = FileEntry(name="model-00001-of-00001.safetensors", size=100, digest="a" * 32)
CONFIG = FileEntry(name="config.json", size=7, digest="b" * 32)
CHANGES = FileEntry(name="delta-00001-of-00001.safetensors", size=9, digest="c" * 32)
TENSORS = (Tensor(name="w", dtype="BF16", shape=(4,), digest="d" * 32, file=SHARD.name),)


def delta(**changes) -> Manifest:
    parent = Parent(epoch=1, number=3, content_digest="e" * 64, files={"model": (CHANGES,)}, stored=("config.json",))
    fields = {
        "channel_id": "c", "epoch": 1, "number": 4, "nonce": "n", "run_id": "r", "created": 1.0, "digest": "xxh3-128",
        "kind": "delta", "parent": parent, "content_digest": content_digest(TENSORS),
        "tracks": {"model": Track(files=(SHARD, CONFIG), tensors=TENSORS)},
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


def test_a_delta_version_lists_the_full_one_and_stores_a_part_of_it():
    manifest, data = seal(delta())
    assert decode(data) == manifest
    assert manifest.nbytes == 107
    assert dict(manifest.stored_files()) == {
        "config.json": CONFIG,
        "delta/e0001-v00000003/delta-00001-of-00001.safetensors": CHANGES,
    }
    assert manifest.stored_bytes == 16


def test_its_full_form_is_a_sealed_full_version_of_the_same_identity_and_content():
    manifest = seal(delta())[0]
    full = manifest.full_form()
    assert (full.kind, full.parent, full.id, full.folder) == ("full", None, manifest.id, manifest.folder)
    assert full.content_digest == manifest.content_digest
    assert decode(full.encoded) == full
    assert full.full_form() is full
    assert dict(full.stored_files()) == dict(full.files())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parent": None}, "without a parent"),
        ({"parent": msgspec.structs.replace(delta().parent, number=4)}, "cannot be its base"),
        ({"parent": msgspec.structs.replace(delta().parent, epoch=2, number=1)}, "cannot be its base"),
        ({"parent": msgspec.structs.replace(delta().parent, files={"other": (CHANGES,)})}, "cannot be its base"),
        ({"parent": msgspec.structs.replace(delta().parent, stored=("x.json",))}, "in no track"),
        ({"parent": msgspec.structs.replace(delta().parent, skips=(Base(epoch=1, number=9, content_digest=""),))},
         "cannot be its base"),
        ({"content_digest": "f" * 64}, "does not follow"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(changes, reason):
    with pytest.raises(BadManifest, match=reason):
        seal(delta(**changes))


def test_names_that_lead_out_of_the_folder_are_refused():
    outside = msgspec.structs.replace(CHANGES, name="../x.safetensors")
    with pytest.raises(BadManifest, match="plain basename"):
        seal(delta(parent=msgspec.structs.replace(delta().parent, files={"model": (outside,)})))
