"""Shapes of models that the GPU benchmarks make up."""

from __future__ import annotations

from typing import Any

SHAPES = {
    "4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 288, "tie_word_embeddings": True,
    },
}  # fmt: skip


def layers_of(shape: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in model order."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (shape["vocab_size"], hidden))]
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}."
        found += [
            (at + "input_layernorm.weight", (hidden,)),
            (at + "self_attn.q_proj.weight", (q, hidden)),
            (at + "self_attn.k_proj.weight", (kv, hidden)),
            (at + "self_attn.v_proj.weight", (kv, hidden)),
            (at + "self_attn.o_proj.weight", (hidden, q)),
            (at + "self_attn.q_norm.weight", (head,)),
            (at + "self_attn.k_norm.weight", (head,)),
            (at + "post_attention_layernorm.weight", (hidden,)),
            (at + "mlp.gate_proj.weight", (inner, hidden)),
            (at + "mlp.up_proj.weight", (inner, hidden)),
            (at + "mlp.down_proj.weight", (hidden, inner)),
        ]
    return [*found, ("model.norm.weight", (hidden,))]
