"""The same weights for everybody: a transformers Llama in bf16, whose tensors lie where torch puts them."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCABULARY = 1024, 8000
LAYER = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 2816)
"""Bytes of a layer's matrices."""


def model_of(gb: float) -> LlamaForCausalLM:
    """About `gb` GB, on the CPU, filled with one block of normal numbers over and over. It is never computed with."""
    layers = max(1, round((gb * 1e9 - 4 * HIDDEN * VOCABULARY) / LAYER))
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=VOCABULARY, tie_word_embeddings=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu").requires_grad_(False)
    block = torch.empty(1 << 22, dtype=torch.bfloat16).normal_(std=0.02)
    for tensor in model.state_dict().values():
        for part in tensor.view(-1).split(len(block)):
            part.copy_(block[: len(part)])
    return model


def step(model: torch.nn.Module) -> None:
    """One element moves on: a version like the one before would be warned of."""
    next(iter(model.state_dict().values())).view(-1)[:1].add_(1)


def nbytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())
