"""The tensors of one version as bytes, straight from the store: for comparing and converting, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from .errors import InvalidInput
from .manifest import MAIN_TRACK, Manifest, TensorEntry
from .shards.read import read_header
from .store.base import Store

CHUNK = 32 << 20


class VersionTensors:
    """One track of a full version (or of the full form of a delta version). InvalidInput if there is no such track."""

    def __init__(self, store: Store, manifest: Manifest, track: str = MAIN_TRACK) -> None:
        if track not in manifest.tracks:
            raise InvalidInput(f"{manifest.id} has no track {track!r}, only {', '.join(sorted(manifest.tracks))}")
        self._store = store
        self._folder = manifest.folder if track == MAIN_TRACK else f"{manifest.folder}/{track}"
        tensors = manifest.tracks[track].tensors
        self.entries = {tensor.name: tensor for tensor in tensors if not tensor.alias_of}
        """By name; ties once."""
        self.stored = {tensor.name: tensor for tensor in tensors if tensor.file}
        """By name, all that lie in the files: ties of the policy `duplicate` under each of their names."""

    def chunks(self, entry: TensorEntry) -> Iterator[memoryview]:
        """A tensor's bytes in pieces of at most CHUNK, each in memory of its own."""
        with closing(self._store.open(f"{self._folder}/{entry.file}")) as reader:
            offset = read_header(reader, name=entry.file).tensors[entry.name].offset
            for start in range(0, entry.spec.nbytes, CHUNK):
                data = memoryview(bytearray(min(CHUNK, entry.spec.nbytes - start)))
                reader.readinto(offset + start, data)
                yield data

    def read(self, entry: TensorEntry) -> bytes:
        """All of a tensor's bytes."""
        return b"".join(self.chunks(entry))
