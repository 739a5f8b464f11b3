"""FSDP1: the original parameters inside the flat parameters, told as boxes, without a collective.

`FSDP.state_dict_type` can gather or re-shard them, but it talks over the job's own group, unshards on the way,
and returns the whole model's worth at once. The flat parameter knows where each original lies in it
(torch 2.0 to 2.13; FSDP1 is closed to changes), and this rank's part of it is a view.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import UnsupportedTensor
from .pieces import Box, Layout, Piece


def fsdp1_units(module: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of every FSDP1 wrapper inside `module`, itself included."""
    return {name: part for name, part in module.named_modules() if type(part).__name__ == "FullyShardedDataParallel"}


def fsdp1_state(module: nn.Module, units: dict[str, nn.Module]) -> dict[str, torch.Tensor | Piece]:
    """Every parameter and persistent buffer by its wrapped name; shared parameters are one object."""
    state: dict[str, torch.Tensor | Piece] = {}
    for name, unit in units.items():
        for inner, piece in _pieces(name, unit):
            state[_join(name, "_fsdp_wrapped_module", inner)] = piece
    inside = {id(parameter) for unit in units.values() for parameter in _flat_views(unit)}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in inside:
            state[name] = parameter
    for name, part in module.named_modules():
        for inner, buffer in part.named_buffers(recurse=False):
            if inner not in part._non_persistent_buffers_set:
                state[_join(name, inner)] = buffer
    return state


def _pieces(name: str, unit: Any) -> Iterator[tuple[str, Piece]]:
    handle = getattr(unit, "_handle", None)
    if handle is None:
        return  # it manages nothing: all its parameters are in units further in
    try:
        yield from _originals(handle)
    except AttributeError as error:
        raise UnsupportedTensor(
            f"FSDP1 module {name!r}: torch {torch.__version__} lays its flat parameter out in another way ({error}): "
            "shard the model with torch.distributed.fsdp.fully_shard"
        ) from error


def _originals(handle: Any) -> Iterator[tuple[str, Piece]]:
    flat = handle.flat_param
    # After a forward the flat parameter may be gathered; the shard stays beside it, in full precision.
    shard = getattr(flat, "_local_shard", flat.data).detach()
    group = tuple(dist.get_process_group_ranks(handle.process_group))
    starts = list(accumulate(flat._numels_with_padding, initial=0))
    places = [start for start, padding in zip(starts, flat._is_padding_mask, strict=False) if not padding]
    parts = len(group) if handle.uses_sharded_strategy else 1
    found: dict[tuple[nn.Module, str], Piece] = {}
    for info, shape, start in zip(flat._param_infos, flat._shapes, places, strict=True):
        layout = _layout(start, torch.Size(shape).numel(), shard.numel(), parts, group)
        mine = layout.box_of(dist.get_rank())
        local = shard.new_empty(0)
        if mine is not None:
            begin = start + mine.offset[0] - (group.index(dist.get_rank()) * shard.numel() if parts > 1 else 0)
            local = shard.view(-1)[begin : begin + mine.shape[0]]
        piece = Piece(tuple(shape), flat.dtype, layout, local)
        found[info.module, info.param_name] = piece
        yield _join(info.module_name, info.param_name), piece
    for shared in flat._shared_param_infos:
        yield _join(shared.module_name, shared.param_name), found[shared.prim_module, shared.prim_param_name]


def _layout(start: int, numel: int, shard: int, parts: int, group: tuple[int, ...]) -> Layout:
    boxes = []
    for part in range(parts):
        begin, end = max(start, part * shard), min(start + numel, (part + 1) * shard)
        if begin < end:
            boxes.append(Box((begin - start,), (end - begin,), (group[part],) if parts > 1 else group))
    return Layout((numel,), tuple(boxes))


def _flat_views(unit: Any) -> Iterator[nn.Parameter]:
    if (handle := getattr(unit, "_handle", None)) is not None:
        yield handle.flat_param
        yield from getattr(handle.flat_param, "_params", None) or ()
        yield from getattr(handle.flat_param, "_shared_params", None) or ()


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
