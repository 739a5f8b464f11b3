"""A channel with all that the page can show: two attempts, deltas, a rollback, a pin, readers that are well and not."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ckptsync import holds
from ckptsync.channel import Channel
from ckptsync.delta.policy import DeltaPolicy
from ckptsync.publish import Publisher
from ckptsync.rollback import roll_back
from ckptsync.store import put_bytes
from ckptsync.version import VersionId

LAYERS = 12
HIDDEN = 48


def lively(root: str, versions: int = 24, **options: Any) -> Channel:
    """`versions` of a small model, in which later layers change more; then a second attempt, and a way back."""
    model = {"model.embed_tokens.weight": torch.randn(64, HIDDEN).bfloat16()}
    for layer in range(LAYERS):
        model[f"model.layers.{layer}.mlp.weight"] = torch.randn(HIDDEN, HIDDEN).bfloat16()
    model["lm_head.weight"] = torch.randn(64, HIDDEN).bfloat16()
    policy = DeltaPolicy(anchor_every=8)
    with Publisher(root, delta=policy, run_id="grpo-7b", **options) as publisher:
        for step in range(versions):
            publisher.publish(model, step=10 * step, metadata={"reward": round(0.2 + step / versions, 3)})
            _train(model, step)
    resumed = VersionId(1, versions - 6)
    with Publisher(root, delta=policy, run_id="grpo-7b-retry", resumed_from=resumed, **options) as publisher:
        for step in range(9):
            publisher.publish(model, step=10 * (versions - 6 + step))
            _train(model, step)
    channel = Channel.open(root)
    holds.pin(channel, VersionId(1, versions - 8), "table 3 of the paper")
    roll_back(channel, channel.manifest(VersionId(2, versions)), "reward collapsed")
    put_bytes(channel.store, "data/e0002-v00000099-died/model.safetensors", bytes(5000))
    _readers(channel, versions)
    return channel


def _train(model: dict[str, torch.Tensor], step: int) -> None:
    for place, (name, tensor) in enumerate(model.items()):
        if name == "model.embed_tokens.weight" and step % 3:
            continue
        share = min(1.0, 0.0004 * math.exp(place / 2.2) * (1 + step % 5))
        hit = torch.rand(tensor.shape) < share
        model[name] = torch.where(hit, tensor * 1.01, tensor)


def _readers(channel: Channel, versions: int) -> None:
    live = [channel.manifest(version) for version in channel.versions()]
    newest = live[-1]
    for name in range(5):
        write_reader(channel, f"gpu-{name}", newest.id.label, [m.id.label for m in live[-18:]], seed=name)
    write_reader(channel, "gpu-slow", live[-4].id.label, [m.id.label for m in live[-9:-3]], seed=9)
    error = {"kind": "bad-shard", "message": "model-00001-of-00001.safetensors: xxh3-128 differs from the manifest's"}
    write_reader(channel, "gpu-ill", live[-2].id.label, [m.id.label for m in live[-12:]], seed=4, error=error)
    channel.lease("evaluator", VersionId(1, versions - 10), 600.0)


def write_reader(
    channel: Channel, name: str, label: str, tried: list[str], *, seed: int = 0, error: dict[str, str] | None = None
) -> None:
    """A receipt as a watcher writes it, with a history that ends now."""
    now, chance = time.time(), torch.Generator().manual_seed(seed)
    history = []
    for place, version in enumerate(tried):
        stage, pause = (float(torch.rand(1, generator=chance)) for _ in range(2))
        at = now - 240 * (len(tried) - place)
        ended = "serving" if (place + seed) % 11 else "failed"
        history.append({"version": version, "state": ended, "at": at, "created": at - 4 - 9 * stage,
                        "stage_seconds": 1.5 + 4 * stage, "pause_seconds": 0.15 + pause / 3,
                        "load_seconds": 0.14})  # fmt: skip
    state = "failed" if error else "serving"
    record = {"label": label, "confirmed": label, "since": now - 200, "engine": f"vllm@http://10.0.0.{seed}:8000",
              "version": tried[-1], "state": state, "stage_seconds": 2.4, "pause_seconds": 0.19, "error": error,
              "history": history, "follow": "latest", "seen": now}  # fmt: skip
    channel.write_receipt(name, record)
