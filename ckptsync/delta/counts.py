"""How many elements of each tensor a delta changes, from its blobs' headers alone: small reads, nothing decoded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from ..logs import Pool
from ..manifest import MAIN_TRACK, Base, Manifest, delta_path
from ..shards.read import read_header
from ..store.base import Reader, Store
from .layout import HEADER_BYTES, read_counts

_READS = 16
"""At a time: on an object store each is a round trip."""


def changed_elements(store: Store, manifest: Manifest, base: Base, track: str = MAIN_TRACK) -> Mapping[str, int]:
    """Tensor -> changed elements; one that did not change is absent. BadShard or NotFound if a file is not there or is
    no delta. The counts are not proven: that takes the whole file."""
    found: dict[str, int] = {}
    for file in base.files.get(track, ()):
        path = f"{manifest.folder}/{delta_path(base.id, track, file.name)}"
        with closing(store.open(path)) as reader, Pool(_READS, thread_name_prefix="ckptsync-counts") as pool:
            tensors = read_header(reader, name=file.name).tensors
            offsets = [stored.offset for stored in tensors.values()]
            heads = pool.map(lambda offset, reader=reader: _head(reader, offset), offsets)
            found.update(zip(tensors, map(read_counts, heads), strict=True))
    return found


def _head(reader: Reader, offset: int) -> bytearray:
    head = bytearray(HEADER_BYTES)
    reader.readinto(offset, memoryview(head))
    return head
