"""What is no tensor to publish, told by looking at it alone. `spec_of` refuses dtypes and layouts besides."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..errors import InvalidInput, UnsupportedTensor
from .pieces import Piece, Weight


def check_items(items: Mapping[str, Weight]) -> None:
    """InvalidInput unless these are names and tensors; UnsupportedTensor for what ZeRO-3 left of a parameter.

    A digest proves bytes, not sense: parameters that were emptied would be published as emptiness.
    """
    for name, tensor in items.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor | Piece):
            raise InvalidInput(f"expected a name and a tensor, got {name!r}, {type(tensor).__name__}")
    empty = [name for name, tensor in items.items() if _is_placeholder(tensor)]
    if empty:
        some = ", ".join(map(repr, empty[:3])) + (", ..." if len(empty) > 3 else "")
        raise UnsupportedTensor(
            f"{len(empty)} of {len(items)} tensors are empty placeholders of a sharded model, such as "
            f"{some}: gather them first, or leave them out"
        )


def _is_placeholder(tensor: Weight) -> bool:
    # `ds_shape` is what DeepSpeed keeps beside a partitioned parameter. A plain shape of (0,) is what remains
    # of it in a state dict; a tensor that is meant to be empty has its other dimensions, e.g. (0, 64).
    full = getattr(tensor, "ds_shape", None)
    return tuple(tensor.shape) == (0,) if full is None else tuple(full) != tuple(tensor.shape)
