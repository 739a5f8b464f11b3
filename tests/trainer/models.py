"""Small models for the trainer's tests; every rank builds the same one from the seed."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("scratch", torch.rand(width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x)))) * self.scale


class TinyModel(nn.Module):
    """Twelve blocks, a tied head, five rows where four ranks shard, one row where most ranks hold nothing."""

    def __init__(self, *, tied: bool = True, width: int = 8, blocks: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.five = nn.Linear(width, 5)
        self.one = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.one(x) + self.five(x).sum()


def reference(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """What ought to be published of a dense model."""
    return {
        name: (tensor.detach().to(dtype) if dtype and tensor.is_floating_point() else tensor.detach()).clone()
        for name, tensor in model.state_dict().items()
    }


def shard(model: TinyModel) -> TinyModel:
    """FSDP2, block by block, the way a trainer does it."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal bit for bit, name for name."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name
