"""Does a version fit an engine, and does the engine report it? `levels` says which of it is demanded.

- Before the engine is touched: every tensor that the engine needs is in the version, with its shape and dtype, and
  nothing else is. An engine's HTTP 200 proves neither: some serve uninitialised memory for a tensor that never came.
- After the load: the label and the fingerprint that the engine itself reports.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from ckptsync.engine import Confirmation, StagedVersion
from ckptsync.errors import BadShard, InvalidName, ProofFailed, SchemaMismatch
from ckptsync.manifest import MAIN_TRACK, Manifest, TensorSpec, Track, check_basename, tensor_specs
from ckptsync.schema import differences

_SHOWN = 3


def check_schema(
    manifest: Manifest,
    schema: Mapping[str, TensorSpec] | None,
    *,
    allow_cast: bool = False,
    engine: str = "the engine",
) -> None:
    """SchemaMismatch unless the version gives the engine exactly what it needs; counts and first names in
    the message.

    A tied tensor is provided under each of its names and needed under one. Another dtype is an error, since
    engines cast silently and what they then serve is not what was trained; with `allow_cast`, plain floats
    may differ. An engine that cannot say its schema (None) is not checked, nor is an adapter, whose tensors
    are not the model's.
    """
    if schema is None or manifest.kind == "adapter":
        return
    track = manifest.tracks.get(MAIN_TRACK)
    if track is None:
        raise SchemaMismatch(f"{manifest.id} has no track {MAIN_TRACK!r}, only {', '.join(sorted(manifest.tracks))}")
    ties = {tensor.name: tensor.alias_of for tensor in track.tensors if tensor.alias_of}
    problems = differences(tensor_specs(track), ties, schema, allow_cast=allow_cast)
    if problems:
        raise SchemaMismatch(f"{manifest.id} does not fit {engine}: {'; '.join(problems)}")


def check_index(path: str, track: Track, *, name: str = "") -> None:
    """BadShard unless an index beside the shards names the manifest's tensors and files, and nothing else.

    Engines open what the index says: an old one mixes in old weights, and a value such as `../x` reads any
    file.
    """
    name = name or os.path.basename(path)
    where, index = {t.name: t.file for t in track.tensors if t.file}, _weight_map(path, name)
    for tensor, file in index.items():
        try:
            check_basename(file)
        except InvalidName as error:
            raise BadShard(f"{name}: tensor {tensor!r}: {error}") from error
        if where.get(tensor) != file:
            raise BadShard(f"{name}: puts {tensor!r} into {file}, the manifest into {where.get(tensor, 'no file')}")
    missing = sorted(where.keys() - index.keys())
    if missing:
        raise BadShard(f"{name}: lacks {len(missing)} of the manifest's tensors ({_first(missing)})")


def _first(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")


def _weight_map(path: str, name: str) -> dict[str, str]:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadShard(f"{name}: not a safetensors index: {error}") from error


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Fingerprints:
    """What one engine reported for each content: going back to a version must give the same weights again."""

    def __init__(self, remember: int = 1024) -> None:
        self._seen: OrderedDict[str, str] = OrderedDict()
        self._remember = remember

    def check(self, version: StagedVersion, confirmation: Confirmation) -> None:
        """ProofFailed if the label is another, or if this content had another fingerprint before."""
        if confirmation.label != version.label:
            raise ProofFailed(
                f"the engine reports {confirmation.label or 'no version'!r} after loading {version.label}"
            )
        content, found = version.manifest.content_digest, confirmation.fingerprint
        before = self._seen.get(content, found)
        if before and found != before:
            raise ProofFailed(
                f"{version.label} has fingerprint {found or 'none'} in the engine, "
                f"and had {before} when the same content was loaded before"
            )
        if found:
            self._note(content, found)

    def _note(self, content: str, fingerprint: str) -> None:
        self._seen[content] = fingerprint
        self._seen.move_to_end(content)
        if len(self._seen) > self._remember:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        """After a restart the engine may run under other settings, with other fingerprints."""
        self._seen.clear()
