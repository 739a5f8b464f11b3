"""Proof that a version fits, and that the engine holds it. Level 1, the files' digests, is taken while
staging.

- Level 2, before the engine is touched: every tensor that the engine needs is in the version, with its
  shape and dtype, and nothing else is. An engine's HTTP 200 proves neither: some serve uninitialised memory
  for a tensor that never came.
- Level 3, after the load: the label and the fingerprint that the engine itself reports.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import msgspec

from ckptsync.engine import Confirmation, StagedVersion
from ckptsync.errors import BadShard, InvalidName, ProofFailed, SchemaMismatch
from ckptsync.manifest import MAIN_TRACK, Manifest, TensorSpec, Track, check_basename, tensor_specs

_FLOATS = {"F64", "F32", "F16", "BF16"}
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
    problems = list(_differences(track, schema, allow_cast))
    if problems:
        raise SchemaMismatch(f"{manifest.id} does not fit {engine}: {'; '.join(problems)}")


def _differences(track: Track, schema: Mapping[str, TensorSpec], allow_cast: bool) -> Iterable[str]:
    provided = tensor_specs(track)
    missing = [name for name in schema if name not in provided]
    unexpected = _unexpected(track, schema)
    both = [(provided[name], needed) for name, needed in schema.items() if name in provided]
    shapes = [f"{p.name} {_dims(p)} but the engine has {_dims(n)}" for p, n in both if p.shape != n.shape]
    dtypes = [f"{p.name} {p.dtype} but the engine has {n.dtype}" for p, n in both if not _dtype_fits(p, n, allow_cast)]
    if missing:
        yield f"{len(missing)} that the engine needs are not in the version ({_first(missing)})"
    if unexpected:
        yield f"{len(unexpected)} that the engine does not know ({_first(unexpected)})"
    if shapes:
        yield f"{len(shapes)} of another shape ({_first(shapes)})"
    if dtypes:
        yield f"{len(dtypes)} of another dtype ({_first(dtypes)})"


def _unexpected(track: Track, schema: Mapping[str, TensorSpec]) -> list[str]:
    known = {t.alias_of or t.name for t in track.tensors if t.name in schema}
    return [t.name for t in track.tensors if (t.alias_of or t.name) not in known]


def _dtype_fits(provided: TensorSpec, needed: TensorSpec, allow_cast: bool) -> bool:
    return provided.dtype == needed.dtype or (allow_cast and {provided.dtype, needed.dtype} <= _FLOATS)


def _dims(spec: TensorSpec) -> str:
    return "x".join(map(str, spec.shape)) or "scalar"


def _first(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")


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
