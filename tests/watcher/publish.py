"""Publish versions with the shard writer and the channel alone: no torch, no ranks."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence

import msgspec

from ckptsync.canary import Canary
from ckptsync.channel import Channel
from ckptsync.digest import DEFAULT, digest
from ckptsync.epochs import Epoch
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import (
    FileEntry,
    Manifest,
    TensorEntry,
    TensorSpec,
    Track,
    combined_content,
    data_folder,
    seal,
)
from ckptsync.shards.plan import plan_shards
from ckptsync.shards.write import ShardWriter
from ckptsync.store.base import put_bytes
from ckptsync.version import VersionId

SPECS = [
    TensorSpec("embed.weight", "F32", (16, 8)),
    TensorSpec("layers.0.weight", "F32", (8, 8)),
    TensorSpec("layers.1.weight", "F32", (8, 8)),
    TensorSpec("norm.weight", "F32", (8,)),
]
SCHEMA = {spec.name: spec for spec in SPECS}


class TestPublisher:
    """One trainer attempt. `publish` commits the next version and returns its manifest."""

    __test__ = False

    def __init__(self, root: str, *, channel: Channel | None = None, resumed_from: VersionId | None = None) -> None:
        self.channel = channel or Channel.create(root)
        self.epoch: Epoch = self.channel.claim_epoch("test", resumed_from)
        self.number = self.epoch.next_number

    def publish(self, seed: int | None = None, **options: object) -> Manifest:
        manifest = self.write(seed, **options)  # type: ignore[arg-type]
        return self.channel.commit(self.epoch, manifest)

    def write(
        self,
        seed: int | None = None,
        *,
        specs: Sequence[TensorSpec] = SPECS,
        max_bytes: int = 600,
        assets: Mapping[str, bytes] | None = None,
        aliases: Mapping[str, str] | None = None,
        canary: Canary | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> Manifest:
        """Everything of a version but the commit. The same seed gives the same weights."""
        version = VersionId(self.epoch.number, self.number)
        self.number += 1
        nonce = uuid.uuid4().hex[:8]
        folder = data_folder(version, nonce)
        files, tensors = self._shards(folder, specs, max_bytes, random.Random(version.number if seed is None else seed))
        index = {"metadata": {}, "weight_map": {t.name: t.file for t in tensors}}
        assets = {
            "config.json": b"{}",
            "model.safetensors.index.json": json.dumps(index).encode(),
            **(assets or {}),
        }
        for name, data in assets.items():
            put_bytes(self.channel.store, f"{folder}/{name}", data)
            files.append(FileEntry(name=name, size=len(data), digest=digest(data)))
        tensors += [_alias(name, target, tensors) for name, target in (aliases or {}).items()]
        return self._manifest(version, nonce, Track(files=tuple(files), tensors=tuple(tensors)), canary, metadata or {})

    def _shards(
        self, folder: str, specs: Sequence[TensorSpec], max_bytes: int, values: random.Random
    ) -> tuple[list[FileEntry], list[TensorEntry]]:
        files, tensors = [], []
        for plan in plan_shards(specs, max_bytes=max_bytes):
            writer = ShardWriter(self.channel.store.write(f"{folder}/{plan.file}"), plan)
            for spec in plan.tensors:
                writer.add(spec.name, values.randbytes(spec.nbytes))
            file, entries = writer.finish()
            files.append(file)
            tensors.extend(entries)
        return files, tensors

    def _manifest(
        self, version: VersionId, nonce: str, track: Track, canary: Canary | None, metadata: Mapping[str, object]
    ) -> Manifest:
        tracks = {"model": track}
        manifest, data = seal(
            Manifest(
                channel_id=self.channel.channel_id,
                epoch=version.epoch,
                number=version.number,
                nonce=nonce,
                run_id="test",
                created=time.time(),
                metadata=dict(metadata),
                digest=DEFAULT,
                content_digest=combined_content(tracks),
                tracks=tracks,
                previous=next((v for v in reversed(self.channel.versions()) if v < version), msgspec.UNSET),
                canary=canary or msgspec.UNSET,
            )
        )
        put_bytes(self.channel.store, f"{manifest.folder}/{SELF_COPY}", data)
        return manifest


def _alias(name: str, target: str, tensors: Sequence[TensorEntry]) -> TensorEntry:
    of = next(t for t in tensors if t.name == target)
    return TensorEntry(name=name, dtype=of.dtype, shape=of.shape, digest=of.digest, alias_of=target)
