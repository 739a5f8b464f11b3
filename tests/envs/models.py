"""Tiny random models that a real vLLM and a real SGLang serve on a CPU.

Built with transformers, in ckptsync's own environment. The weights have a standard deviation of 0.15: with
the usual 0.02 a random model's greedy output hardly depends on its weights, and a test that compares tokens
proves nothing. The tokenizer is byte level without merges, so that it needs no training and no download.
"""

from __future__ import annotations

import json
import os
from typing import Any

SHAPE = {
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
SPECIAL = ["<s>", "</s>", "<pad>"]


def tiny_model(
    folder: str,
    seed: int,
    *,
    family: str = "qwen3",
    dtype: str = "bfloat16",
    tied: bool = False,
    **shape: Any,
) -> str:
    """Write a whole Hugging Face checkpoint, several shards and an index, into `folder`; returns it.

    The same seed gives the same bytes. `family` is llama, qwen2, qwen3 or qwen3_moe; `shape` overrides config fields.
    """
    import torch

    torch.manual_seed(seed)
    model = build(family, tied, shape)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm scales too: a version that differs only there must be told from its neighbours.
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.15)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="300KB")
    write_index(folder)
    write_tokenizer(folder)
    return folder


def build(family: str, tied: bool, shape: dict[str, Any]) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    }[family]
    # Qwen3's head size is 128 unless said; the others derive it.
    heads = {"head_dim": 32} if family.startswith("qwen3") else {}
    experts = EXPERTS if family == "qwen3_moe" else {}
    return model_class(config_class(**{**SHAPE, **heads, **experts, "tie_word_embeddings": tied, **shape}))


def write_tokenizer(folder: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2]
    )
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)


def write_index(folder: str) -> None:
    """Write model.safetensors.index.json where there is none: transformers leaves it out for a single
    shard."""
    path = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(path):
        return
    from safetensors import safe_open

    shard = "model.safetensors"
    with safe_open(os.path.join(folder, shard), framework="np") as file:
        names = sorted(file.keys())
    total = os.path.getsize(os.path.join(folder, shard))
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": dict.fromkeys(names, shard)}, file, indent=1)


def canary_of(folder: str, prompt: list[int]) -> Any:
    """What transformers says to `prompt` with the checkpoint in `folder`, in its own dtype."""
    from transformers import AutoModelForCausalLM

    from ckptsync.canary import record

    return record(AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True), prompt)
