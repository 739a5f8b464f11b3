"""Small torch models that load as engines do: fused qkv, one rank's slices, padded vocabulary, tied names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

HEADS = {"q": 8, "k": 4, "v": 4}
HIDDEN, VOCABULARY, PADDED = 6, 10, 16


@dataclass(frozen=True)
class Rank:
    rank: int = 0
    size: int = 1

    def slice(self, total: int) -> slice:
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


class Toy(nn.Module):
    """`qkv` is fused by rows, `out` is cut by columns over the ranks, `embed` is padded with zeros."""

    def __init__(self, rank: Rank | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank = rank or Rank()
        size = self.rank.size
        self.qkv = nn.Parameter(torch.full((sum(HEADS.values()) // size, HIDDEN), -1.0, dtype=dtype))
        self.out = nn.Parameter(torch.full((HIDDEN, HEADS["q"] // size), -1.0, dtype=dtype))
        self.embed = nn.Parameter(torch.full((PADDED // size, HIDDEN), -1.0, dtype=dtype))
        self.norm = nn.Parameter(torch.full((HIDDEN,), -1.0, dtype=dtype))
        self.register_buffer("scale", torch.ones(2, dtype=dtype))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "head.weight":
                continue  # tied
            getattr(self, "load_" + name.partition(".")[0])(name, tensor)

    def load_attn(self, name: str, tensor: torch.Tensor) -> None:
        which, start = name.split(".")[1], 0
        if which == "o":
            self.out.data.copy_(tensor[:, self.rank.slice(tensor.shape[1])])
            return
        for key, rows in HEADS.items():
            if key == which:
                part = tensor[self.rank.slice(rows)]
                self.qkv.data[start : start + len(part)].copy_(part)
            start += rows // self.rank.size

    def load_embed(self, name: str, tensor: torch.Tensor) -> None:
        own = self.rank.slice(PADDED)
        part = tensor[own.start : min(own.stop, VOCABULARY)]
        self.embed.data[: len(part)].copy_(part)
        self.embed.data[len(part) :].fill_(0)

    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor)


def checkpoint(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"attn.{key}.weight": (rows, HIDDEN) for key, rows in HEADS.items()}
    shapes |= {"embed.weight": (VOCABULARY, HIDDEN), "attn.o.weight": (HIDDEN, HEADS["q"]), "norm.weight": (HIDDEN,)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    tensors["head.weight"] = tensors["embed.weight"].clone()
    return tensors


def layouts(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
