"""Adapters out of PEFT models that FSDP2 shards, on real gloo ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.shards.tensors import load_tensors
from tests.lora.models import TinyLM, with_adapter
from tests.trainer.models import same
from tests.trainer.ranks_harness import returned, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def publish_sharded(rank: int, root: str) -> list[str]:
    from torch.distributed.fsdp import fully_shard

    from ckptsync.publish import Publisher

    model = with_adapter(TinyLM(width=6), 1, task_type=None, r=3)
    for layer in model.base_model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(torch.arange(8))
    with Publisher(root, dtype=torch.bfloat16) as publisher:
        done = [publisher.publish(model, kind="adapter"), publisher.publish(model, merge_lora=True)]
    return [publish.content_digest for publish in done]


def publish_dense(root: str) -> list[str]:
    from ckptsync.publish import Publisher

    model = with_adapter(TinyLM(width=6), 1, task_type=None, r=3)
    with Publisher(root, dtype=torch.bfloat16) as publisher:
        done = [publisher.publish(model, kind="adapter"), publisher.publish(model, merge_lora=True)]
    return [publish.content_digest for publish in done]


def test_a_sharded_model_publishes_what_the_dense_one_does(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in ("dense", "sharded")]
    expected = publish_dense(roots[0])
    for digests in returned(run_ranks(2, publish_sharded, roots[1])):
        assert digests == expected
    for version in ("1", "2"):
        manifests = [Channel.open(root).resolve(version) for root in roots]
        found = [
            dict(load_tensors(os.path.join(root, manifest.folder), manifest.tracks["model"], verify=True))
            for root, manifest in zip(roots, manifests, strict=True)
        ]
        same(found[1], found[0])
