"""What changed between two versions in encodings that other stacks read; ours is several times smaller.

- `xor`: `weight_v000042/model-00001-of-00001.safetensors`, in which each changed tensor's entry is one zstd frame of
  new XOR old, byte by byte, with the digest of the new tensor under its name in the file's metadata; and an index
  whose metadata says version, base version and encodings. The layout of slime, miles, vime, SGLang's `/pull_weights`
  and stitch; what each of them asks of it is in docs/delta-format.md.
- `open`: `delta.safetensors` with `<name>.indices` (I32, into the flattened tensor) and `<name>.values` of each changed
  tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import zstandard

from ..channel import Channel
from ..errors import InvalidInput
from ..manifest import Manifest, TensorSpec
from ..schema_change import schema_change
from ..shards.index import INDEX_NAME
from ..shards.plan import ShardPlan, element_size
from ..shards.write import ShardWriter
from ..store.base import Store, put_bytes
from ..store.fresh import fresh_folder
from ..version import VersionId
from ..version_tensors import VersionTensors
from . import whole

XOR_FILE = "model-00001-of-00001.safetensors"
OPEN_FILE = "delta.safetensors"

Pair = tuple[TensorSpec, bytes, bytes, str]
"""Spec, old bytes, new bytes, digest of the new."""


def write_profile(channel: Channel, old: Manifest, new: Manifest, folder: str, profile: str) -> str:
    """Write the changes of the track `model` below `folder`; returns the folder that holds them.

    InvalidInput for a profile that is not known, for a version against itself, for versions whose tensors are not the
    same, for `xor` between versions of which no reader of it can go from one to the other, and for a folder that holds
    something. The changed tensors' bytes are held in memory, encoded, one at a time besides.
    """
    if profile not in ("xor", "open"):
        raise InvalidInput(f"--profile {profile} is not known: xor and open are")
    if old.id == new.id:
        raise InvalidInput(f"--since {old.id} is the version itself: nothing changed since")
    if profile == "xor" and old.number + 1 != new.number:
        raise InvalidInput(
            f"--profile xor: its readers go from one number to the next, and refuse {new.id} on top of {old.id}: write "
            f"the changes of each version since {old.number} (export {old.number + 1} --since {old.number}, and so on),"
            " or the full version, or use --profile open"
        )
    if profile == "xor":
        folder = os.path.join(folder, f"weight_v{new.number:06d}")
    with ExitStack() as stack:
        target = stack.enter_context(fresh_folder(folder, whole=INDEX_NAME if profile == "xor" else OPEN_FILE))
        stores = [stack.enter_context(whole(channel, manifest)) for manifest in (old, new)]
        before, after = (VersionTensors(store, full) for store, full in stores)
        pairs = _pairs(before, after, (old.id, new.id))
        (_write_xor if profile == "xor" else _write_open)(target, pairs, old, new)
    return folder


def _pairs(old: VersionTensors, new: VersionTensors, ids: Sequence[VersionId]) -> Iterator[Pair]:
    # Whoever patches files has to patch a tied tensor wherever it is stored.
    specs = [{name: entry.spec for name, entry in each.stored.items()} for each in (old, new)]
    if differs := schema_change(*specs):
        raise InvalidInput(f"{ids[0]} and {ids[1]} do not have the same tensors: {'; '.join(differs.lines())}")
    for name, entry in new.stored.items():
        if old.stored[name].digest != entry.digest:
            yield entry.spec, old.read(old.stored[name]), new.read(entry), entry.digest


def _write_xor(target: Store, pairs: Iterator[Pair], old: Manifest, new: Manifest) -> None:
    compressor = zstandard.ZstdCompressor(level=1)
    blobs: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    for spec, before, after, digest in pairs:
        changed = np.frombuffer(before, dtype=np.uint8) ^ np.frombuffer(after, dtype=np.uint8)
        blobs[spec.name], digests[spec.name] = compressor.compress(changed.data), digest
    specs = tuple(TensorSpec(name, "U8", (len(blob),)) for name, blob in blobs.items())
    _write_file(target, ShardPlan(XOR_FILE, specs), blobs, digests)
    facts = {
        "version": f"{new.number:06d}",
        "base_version": f"{old.number:06d}",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": new.digest,
    }
    index = {"metadata": facts, "weight_map": dict.fromkeys(sorted(blobs), XOR_FILE)}
    put_bytes(target, INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")


def _write_open(target: Store, pairs: Iterator[Pair], old: Manifest, new: Manifest) -> None:
    specs: list[TensorSpec] = []
    data: dict[str, bytes] = {}
    for spec, before, after, _ in pairs:
        size = element_size(spec.dtype)
        olds, news = (np.frombuffer(each, dtype=np.dtype((np.void, size))) for each in (before, after))
        places = np.flatnonzero(olds != news)
        if len(news) >= 1 << 31 or size * len(news) != spec.nbytes or spec.dtype in {"F4", "F6_E2M3", "F6_E3M2"}:
            raise InvalidInput(f"tensor {spec.name!r} has no I32 index of each element: use --profile xor")
        specs += [TensorSpec(f"{spec.name}.indices", "I32", (len(places),)),
                  TensorSpec(f"{spec.name}.values", spec.dtype, (len(places),))]  # fmt: skip
        data |= {specs[-2].name: places.astype("<i4").tobytes(), specs[-1].name: news[places].tobytes()}
    ordered = tuple(sorted(specs, key=lambda spec: -element_size(spec.dtype)))  # every tensor on a whole address
    facts = {"sparse": "true", "model_version": str(new.number), "base_version": str(old.number)}
    _write_file(target, ShardPlan(OPEN_FILE, ordered), data, facts)


def _write_file(target: Store, plan: ShardPlan, data: Mapping[str, bytes], metadata: Mapping[str, str]) -> None:
    writer = target.write(plan.file)
    try:
        shard = ShardWriter(writer, plan, metadata=metadata)
        for spec in plan.tensors:
            shard.add(spec.name, data[spec.name])
        shard.finish()
    except BaseException:
        writer.abort()
        raise
