"""Small stores and files for the tests of shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

import torch

from ckptsync.manifest import FileEntry, TensorEntry, TensorSpec, Track
from ckptsync.shards.plan import ShardPlan, plan_shards
from ckptsync.shards.tensors import spec_of, tensor_bytes
from ckptsync.shards.write import ShardWriter


class MemoryWriter:
    """A store.Writer that keeps what it was given; `visible` is what a reader would see."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.visible: bytes | None = None
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data

    def commit(self) -> None:
        self.visible = bytes(self.data)

    def abort(self) -> None:
        self.aborted = True


class PlainFileWriter(MemoryWriter):
    """The same, into a file at the end."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def commit(self) -> None:
        with open(self.path, "xb") as file:
            file.write(self.data)


class MemoryReader:
    """A store.Reader over bytes that records how much was asked for. `size` may be a lie."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data = data
        self.size = len(data) if size is None else size
        self.asked: list[int] = []

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self.asked.append(buffer.nbytes)
        buffer[:] = self.data[offset : offset + buffer.nbytes]

    def close(self) -> None:
        raise AssertionError("a reader that was passed in stays open")


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def raw_shard(header: object, data: bytes = b"") -> bytes:
    """A file with any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_plan(
    folder: str, plan: ShardPlan, tensors: Mapping[str, torch.Tensor]
) -> tuple[FileEntry, tuple[TensorEntry, ...]]:
    writer = ShardWriter(PlainFileWriter(os.path.join(folder, plan.file)), plan)
    for each in plan.tensors:
        writer.add(each.name, tensor_bytes(tensors[each.name]))
    return writer.finish()


def write_track(
    folder: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    max_bytes: int = 1 << 30,
    ties: Iterable[tuple[str, str]] = (),
) -> Track:
    """Shards in `folder`, and the track that a manifest would have of them. `ties` are (alias, target)."""
    plans = plan_shards([spec_of(name, tensor) for name, tensor in tensors.items()], max_bytes=max_bytes)
    written = [write_plan(folder, plan, tensors) for plan in plans]
    by_name = {entry.name: entry for _, entries in written for entry in entries}
    for alias, target in ties:
        of = by_name[target]
        by_name[alias] = TensorEntry(name=alias, dtype=of.dtype, shape=of.shape, digest=of.digest, alias_of=target)
    return Track(files=tuple(file for file, _ in written), tensors=tuple(by_name.values()))
