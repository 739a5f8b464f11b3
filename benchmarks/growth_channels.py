"""Channels of any size in memory, made in seconds: what `growth` measures on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ckptsync.canonical import canonical
from ckptsync.channel import Channel
from ckptsync.digest import Bytes, digest, sha256
from ckptsync.layout import manifest_path
from ckptsync.manifest import FileEntry, Manifest, TensorEntry, Track, combined_content, data_folder, seal
from ckptsync.store.base import Entry, Reader, Writer
from ckptsync.testing import MemoryStore

FILE = "model.safetensors"


class Shelves:
    """A store in memory whose listings cost what they give out, as an index does: MemoryStore looks at every file."""

    url = "memory://"

    def __init__(self) -> None:
        self._shelves: dict[str, dict[str, MemoryStore]] = {}

    def list(self, folder: str) -> Iterator[Entry]:
        top, _, below = folder.partition("/")
        shelves = self._shelves.get(top, {}) if folder else {k: v for s in self._shelves.values() for k, v in s.items()}
        wanted = [shelves[_shelf(f"{folder}/")[1]]] if below and _shelf(f"{folder}/")[1] in shelves else []
        for shelf in wanted if below else shelves.values():
            yield from shelf.list(folder)

    def open(self, path: str) -> Reader:
        return self._on(path).open(path)

    def write(self, path: str) -> Writer:
        return self._on(path).write(path)

    def create(self, path: str, data: bytes) -> None:
        self._on(path).create(path, data)

    def delete(self, path: str) -> None:
        self._on(path).delete(path)

    def put(self, path: str, data: Bytes) -> None:
        """Without asking whether it is there."""
        self._on(path).files[path] = bytes(data)

    def _on(self, path: str) -> MemoryStore:
        top, folder = _shelf(path)
        shelves = self._shelves.setdefault(top, {})
        if folder not in shelves:
            shelves[folder] = MemoryStore()
        return shelves[folder]


def _shelf(path: str) -> tuple[str, str]:
    """A data folder has a shelf of its own, and so has each other top folder."""
    parts = path.split("/")
    return parts[0], "/".join(parts[:2]) if parts[0] == "data" else parts[0]


def channel_with(versions: int) -> Shelves:
    """A channel with so many committed versions, alike but for their numbers."""
    store = Shelves()
    channel = Channel.create(store)
    epoch = channel.claim_epoch("growth")
    tensor = TensorEntry(name="w", dtype="U8", shape=(1,), digest=digest(b"\0"), file=FILE)
    tracks = {"model": Track(files=(FileEntry(name=FILE, size=100, digest=digest(b"\0")),), tensors=(tensor,))}
    first = Manifest(
        channel_id=channel.channel_id, epoch=epoch.number, number=1, nonce="n", run_id="growth", created=time.time(),
        digest="xxh3-128", content_digest=combined_content(tracks), tracks=tracks,
    )  # fmt: skip
    body = msgspec.to_builtins(first)
    body.pop("manifest_digest")
    for number in range(1, versions):
        _put(store, first, body | {"number": number})
    channel.commit(epoch, seal(msgspec.structs.replace(first, number=versions))[0])
    return store


def _put(store: Shelves, first: Manifest, body: dict[str, Any]) -> None:
    body["manifest_digest"] = sha256(canonical(body))
    version = first.id._replace(number=body["number"])
    store.put(manifest_path(version), canonical(body))
    store.put(f"{data_folder(version, first.nonce)}/{FILE}", bytes(100))
