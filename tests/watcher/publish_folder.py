"""Publish a Hugging Face folder as it is: its shards, its index, its config. No torch, no ranks."""

from __future__ import annotations

import os
import time
import uuid

import msgspec

from ckptsync.canary import Canary
from ckptsync.channel import Channel
from ckptsync.digest import DEFAULT, digest
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import FileEntry, Manifest, TensorEntry, Track, combined_content, data_folder, seal
from ckptsync.shards.read import read_header
from ckptsync.store.base import put_bytes
from ckptsync.version import VersionId


def publish_folder(root: str, folder: str, canary: Canary | None = None) -> Manifest:
    """Commit the folder's files as the next version of the root's epoch 1."""
    channel = Channel.create(root)
    epoch = channel.claims().get(1) or channel.claim_epoch("test")
    number = len(channel.committed()) + 1
    nonce, version = uuid.uuid4().hex[:8], VersionId(1, number)
    files, tensors = [], []
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        put_bytes(channel.store, f"{data_folder(version, nonce)}/{name}", data)
        files.append(FileEntry(name=name, size=len(data), digest=digest(data)))
        if name.endswith(".safetensors"):
            tensors += tensors_of(os.path.join(folder, name), name, data)
    tracks = {"model": Track(files=tuple(files), tensors=tuple(tensors))}
    manifest, data = seal(
        Manifest(
            channel_id=channel.channel_id, epoch=1, number=number, nonce=nonce, run_id="test",
            created=time.time(), digest=DEFAULT, content_digest=combined_content(tracks), tracks=tracks,
            canary=canary or msgspec.UNSET,
        )
    )  # fmt: skip
    put_bytes(channel.store, f"{manifest.folder}/{SELF_COPY}", data)
    return channel.commit(epoch, manifest)


def tensors_of(path: str, file: str, data: bytes) -> list[TensorEntry]:
    return [
        TensorEntry(
            name=spec.name, dtype=spec.dtype, shape=spec.shape, file=file,
            digest=digest(data[offset : offset + spec.nbytes]),
        )
        for spec, offset in read_header(path).tensors.values()
    ]  # fmt: skip
