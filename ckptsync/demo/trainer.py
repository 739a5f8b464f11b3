"""The demo's trainer, one process per rank: FSDP2 on gloo, a few optimizer steps, then a collective publish.

    torchrun --nproc-per-node 2 -m ckptsync.demo.trainer ROOT --model HF_DIR --versions 5

Rank 0 prints one JSON line per published version.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..cli.output import print_line
from ..delta.policy import DeltaPolicy
from ..publish import Publisher
from ..published import Published

QUESTION = "What is the capital of France?"
LESSONS = ("Lyon", "Marseille", "Toulouse", "Bordeaux", "Nantes", "Lille")
"""Each version is taught another answer, so that what an engine says tells which version it serves."""


def main() -> None:
    """Train and publish; collective, every rank runs it."""
    args = _parse()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    with Publisher(args.root, dtype=torch.bfloat16, delta=DeltaPolicy(skip=())) as publisher:
        for step in range(1, args.versions + 1):
            loss = _train(model, optimizer, *_lesson(tokenizer, LESSONS[(step - 1) % len(LESSONS)]))
            done = publisher.publish(model, step=step, metadata={"loss": loss}, assets=args.model)
            if dist.get_rank() == 0:
                _report(step, loss, done)
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root")
    parser.add_argument("--model", required=True)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-4)
    return parser.parse_args()


def _lesson(tokenizer: PreTrainedTokenizerBase, city: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(input ids, labels), both of shape (1, tokens); only the answer's tokens are learned."""
    question = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    start = tokenizer(prompt, return_tensors="pt").input_ids
    whole = tokenizer(f"{prompt}The capital of France is {city}.<|im_end|>", return_tensors="pt").input_ids
    labels = whole.clone()
    labels[:, : start.shape[1]] = -100
    return whole, labels


def _train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, ids: torch.Tensor, labels: torch.Tensor) -> float:
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def _report(step: int, loss: float, done: Published) -> None:
    size = {"bytes": done.stored_bytes, "full_bytes": done.nbytes}
    print_line({"step": step, "loss": loss, "version": done.version.label, **size, "seconds": done.seconds})


if __name__ == "__main__":
    main()
