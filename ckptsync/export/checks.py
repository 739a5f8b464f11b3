"""What is no tensor to publish, told by looking at it alone. `spec_of` refuses dtypes and layouts besides."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import InvalidInput, UnsupportedTensor
from .pieces import Piece, Weight


def check_items(items: Mapping[str, Weight]) -> None:
    """InvalidInput unless these are names and tensors; UnsupportedTensor for a nested tensor, and for what ZeRO-3
    left of a parameter.

    A digest proves bytes, not sense: parameters that were emptied would be published as emptiness.
    """
    for name, tensor in items.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor | Piece):
            raise InvalidInput(f"expected a name and a tensor, got {name!r}, {type(tensor).__name__}")
        if isinstance(tensor, torch.Tensor) and tensor.is_nested:
            raise UnsupportedTensor(f"tensor {name!r} is nested: give its parts, or call to_padded_tensor()")
    empty = [name for name, tensor in items.items() if _is_placeholder(name, tensor)]
    if empty:
        some = ", ".join(map(repr, empty[:3])) + (", ..." if len(empty) > 3 else "")
        raise UnsupportedTensor(
            f"{len(empty)} of {len(items)} tensors are empty placeholders of a sharded model, such as "
            f"{some}: gather them first, or leave them out"
        )


def _is_placeholder(name: str, tensor: Weight) -> bool:
    # `ds_shape` is what DeepSpeed keeps beside a partitioned parameter. In a state dict a plain shape of (0,) is all
    # that remains of it, and is told by its name: ZeRO-3 leaves small parameters whole (`param_persistence_threshold`),
    # so it is the `weight`s of layers that are emptied, which no model has on purpose.
    full = getattr(tensor, "ds_shape", None)
    if full is not None:
        return tuple(full) != tuple(tensor.shape)
    return tuple(tensor.shape) == (0,) and name.rpartition(".")[2] == "weight"
