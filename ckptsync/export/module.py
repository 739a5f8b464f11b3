"""The tensors of a module or a state dict: in order, under clean names, with ties told apart from views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import UnsupportedTensor
from .checks import check_items
from .fsdp1 import fsdp1_state, fsdp1_units
from .names import clean_names, layer_order
from .pieces import Piece, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensors:
    """Clean name -> tensor in walk order, and the wrapper parts that were taken off names."""

    tensors: Mapping[str, Weight]
    removed: tuple[str, ...]


def module_tensors(module: nn.Module) -> StateTensors:
    """Parameters and persistent buffers in module order. UnsupportedTensor names what cannot be published.

    `state_dict` is asked for rather than `named_parameters`: FSDP2 goes back to its sharded parameters there,
    also after a forward that left the root gathered, and non-persistent buffers stay out.
    """
    if units := fsdp1_units(module):
        state = fsdp1_state(module, units)
        clean = clean_names(state).clean
        return _state({name: state[name] for name in layer_order(state, key=clean.__getitem__)})
    return _state(module.state_dict(keep_vars=True))


def live_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """`module_tensors` to load into. UnsupportedTensor for FSDP1, which has no tensor of its own for a parameter."""
    tensors = module_tensors(module).tensors
    live = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    if flat := [name for name in tensors if name not in live]:
        raise UnsupportedTensor(f"{flat[0]!r} is wrapped by FSDP1: shard it with torch.distributed.fsdp.fully_shard")
    return live


def dict_tensors(state: Mapping[str, torch.Tensor]) -> StateTensors:
    """A state dict, brought into layer order: loaded from files it comes sorted as text."""
    return _state({name: state[name] for name in layer_order(state)})


def _state(state: Mapping[str, Weight]) -> StateTensors:
    check_items(state)
    names = clean_names(state)
    tensors = {names.clean[name]: tensor for name, tensor in state.items()}
    return StateTensors(tensors=tensors, removed=names.removed)


def find_ties(tensors: Mapping[str, Weight]) -> dict[str, str]:
    """Further name -> first name, where both are the very same memory with the same shape and strides.

    Views of one flat buffer share the storage but not the place in it: they are tensors of their own. Nor are
    two empty tensors tied, which all lie at address 0.
    """
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 0:
            continue
        owner = first.setdefault(_memory(tensor), name)
        if owner != name:
            ties[name] = owner
    return ties


def _memory(tensor: Weight) -> tuple[object, ...]:
    if isinstance(tensor, Piece):
        return (id(tensor),)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # A rank may hold no rows of a sharded tensor; then only the object tells.
    place = local.data_ptr() or id(tensor)
    return (place, local.device, tensor.dtype, tuple(tensor.shape), tuple(local.shape), local.stride())
