"""PEFT models for the LoRA tests. Every rank builds the same one from the seed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn


def with_adapter(base: nn.Module, seed: int, name: str = "default", **config: Any) -> Any:
    """`base` wrapped by PEFT, with random A and B: as PEFT makes them, B is zero and proves nothing."""
    import peft

    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice on models without a hub name
        model = peft.get_peft_model(base, peft.LoraConfig(**fields), adapter_name=name)
    randomise(model, seed, name)
    return model


def randomise(model: nn.Module, seed: int, name: str = "default", scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key and f".{name}" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x) * self.v_proj(x)


class TinyLM(nn.Module):
    """Two layers and a tied head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(2))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
