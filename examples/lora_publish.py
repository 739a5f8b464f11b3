"""Publish a LoRA adapter, and the same adapter folded into the base weights; load the adapter back with PEFT.

    python examples/lora_publish.py [ROOT]

An engine follows the adapters with `watchers.adapters.AdapterEngine` and serves them as `policy@e1-v1`, ...
"""

from __future__ import annotations

import os
import sys
import tempfile

import peft
import torch
import transformers

import ckptsync


def tiny_model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config)


def main() -> None:
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    tokens = torch.arange(16)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as scratch:
        root = sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/channel"
        # A root of their own for each kind: an engine follows either.
        with ckptsync.Publisher(f"{root}/adapters") as adapters, ckptsync.Publisher(f"{root}/merged") as merged:
            adapter = adapters.publish(model, kind="adapter", step=5)
            whole = merged.publish(model, merge_lora=True, step=5)
        print(f"adapter {adapter.version}: {adapter.nbytes} bytes; merged {whole.version}: {whole.nbytes} bytes")

        folder = os.path.join(root, "adapters", adapter.manifest.folder)
        again = peft.PeftModel.from_pretrained(tiny_model(), folder)
        same = torch.equal(again(tokens).logits, model(tokens).logits)
        print(f"PEFT loads it back: {'the same logits' if same else 'OTHER LOGITS'}")
        if not same:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
