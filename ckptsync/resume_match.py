"""Which tensors of a version go into which of a model, found from names, shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .errors import BadShard, InvalidInput
from .export.checks import check_items
from .export.module import find_ties
from .export.names import clean_names
from .manifest import TensorEntry, TensorSpec, Track
from .resume_read import Part, part_of
from .shards.tensors import TORCH_DTYPES, spec_of
from .version import VersionId
from .wording import counted

Resumable = nn.Module | Mapping[str, torch.Tensor]


class Load(NamedTuple):
    """One tensor to load: from which entry, into what, and which part of it this rank holds."""

    entry: TensorEntry
    target: torch.Tensor
    part: Part


def targets_of(model: Resumable) -> dict[str, torch.Tensor]:
    """Clean name -> the live tensor. InvalidInput, naming it, for what cannot be loaded into."""
    if isinstance(model, nn.Module):
        _refuse_fsdp1(model)
        # As for a publish: FSDP2 goes back to its sharded parameters when it is asked for its state dict.
        state: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
    elif isinstance(model, Mapping):
        state = model
    else:
        raise InvalidInput(f"a model to resume into is a module or a dict of its tensors, not {type(model).__name__}")
    check_items(state)
    clean = clean_names(state).clean
    meta = [name for name, tensor in state.items() if tensor.is_meta]
    if meta:
        raise InvalidInput(
            f"on the meta device: {counted(len(meta), 'tensor')}, such as {meta[0]!r}: call to_empty() first"
        )
    for name, tensor in state.items():
        if tensor.layout is torch.strided and _overlaps(tensor):
            raise InvalidInput(f"tensor {name!r} is expanded: several of its elements are one, call contiguous() first")
    return {clean[name]: tensor for name, tensor in state.items()}


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _refuse_fsdp1(model: nn.Module) -> None:
    for name, part in model.named_modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise InvalidInput(f"module {name!r} is wrapped by FSDP1: resume before wrapping, or use fully_shard")


def match(
    targets: Mapping[str, torch.Tensor], track: Track, version: VersionId, allow_cast: bool = False
) -> list[Load]:
    """Every tensor of the model with its entry; InvalidInput unless the version fits the model exactly.

    A tied tensor is loaded once, and counts as there if any of its names is.
    """
    entries = {entry.name: entry for entry in track.tensors}
    ties = find_ties(targets)
    groups: dict[str, list[str]] = {}
    for other, first in ties.items():
        groups.setdefault(first, []).append(other)
    names = {
        name: _provided((name, first := ties.get(name, name), *groups.get(first, ())), entries) for name in targets
    }
    missing = [name for name, found in names.items() if found is None]
    used = {_stored(found, entries).name for found in names.values() if found is not None}
    unexpected = [name for name, entry in entries.items() if _stored(entry, entries).name not in used]
    loads, problems = [], []
    for name, entry in names.items():
        if entry is None:
            continue
        if problem := _misfit(entry.spec, spec_of(name, targets[name]), allow_cast):
            problems.append(problem)
        elif name in ties:
            if entry.digest != (names[ties[name]] or entry).digest:
                problems.append(f"{name} is tied to {ties[name]} in the model, and differs from it in the version")
        else:
            loads.append(Load(_stored(entry, entries), targets[name], part_of(name, targets[name])))
    _refuse(version, {"missing": missing, "unexpected": unexpected, "of another shape, dtype or tie": problems})
    return loads


def _provided(group: Sequence[str], entries: Mapping[str, TensorEntry]) -> TensorEntry | None:
    """The version's entry for a tensor with these names."""
    return next((entries[each] for each in group if each in entries), None)


def _stored(entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> TensorEntry:
    for _ in entries:
        if not entry.alias_of:
            return entry
        entry = entries[entry.alias_of]
    raise BadShard(f"tensor {entry.name!r} is tied in a circle")


def _misfit(stored: TensorSpec, wanted: TensorSpec, allow_cast: bool) -> str:
    name = wanted.name
    if stored.shape != wanted.shape:
        return f"{name} {list(stored.shape)}, in the model {list(wanted.shape)}"
    if stored.dtype == wanted.dtype:
        return ""
    both = [TORCH_DTYPES.get(spec.dtype) for spec in (stored, wanted)]
    floats = all(dtype is not None and dtype.is_floating_point for dtype in both)
    hint = " (allow_cast=True casts)" if floats else ""
    return "" if allow_cast and floats else f"{name} {stored.dtype}, in the model {wanted.dtype}{hint}"


def _refuse(version: VersionId, problems: Mapping[str, Sequence[str]]) -> None:
    told = [f"{len(names)} {what} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
            for what, names in problems.items() if names]  # fmt: skip
    if told:
        raise InvalidInput(f"{version} does not fit the model: {'; '.join(told)}. Nothing was changed")
