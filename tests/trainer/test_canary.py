"""A canary on its way from a trainer into a version, and out of it again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptsync.canary import Canary, record
from ckptsync.channel import Channel
from ckptsync.copies import export_version, import_version
from ckptsync.publish import Publisher
from tests.trainer.models import TinyModel, shard
from tests.trainer.ranks_harness import returned, run_ranks


class Causal(TinyModel):
    """Answers as the language models of transformers do; the next token depends on all before it."""

    def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(logits=super().forward(input_ids.cumsum(-1) % 16))


@pytest.mark.parametrize("background", [False, True])
def test_a_version_says_what_its_model_said(root: str, background: bool) -> None:
    model = Causal()
    canary = record(model, [1, 2, 3], max_new_tokens=4, atol=0.5)
    with Publisher(root) as publisher:
        if background:
            publisher.publish(model, canary=canary, background=True).result()
        else:
            publisher.publish(model, canary=canary)
        assert Channel.open(root).latest().canary == canary
        assert not publisher.publish(model).manifest.canary, "each version has its own, or none"


def test_it_is_exported_and_imported_with_the_version(root: str, tmp_path: Any) -> None:
    model = Causal()
    canary = record(model, [1, 2, 3])
    with Publisher(root) as publisher:
        publisher.publish(model, canary=canary)
    channel, other = Channel.open(root), Channel.create(str(tmp_path / "other"))
    export_version(channel, channel.latest(), str(tmp_path / "out"))
    assert import_version(other, str(tmp_path / "out"), "run").canary == canary


def record_sharded(rank: int, root: str) -> Canary:
    model = shard(Causal())
    canary = record(model, [1, 2, 3], max_new_tokens=4)
    with Publisher(root) as publisher:
        publisher.publish(model, canary=canary)
    return canary


@pytest.mark.distributed
@pytest.mark.slow
def test_a_sharded_model_records_what_the_dense_one_does_on_every_rank(root: str) -> None:
    dense = record(Causal(), [1, 2, 3], max_new_tokens=4)
    canaries = returned(run_ranks(2, record_sharded, root))
    assert canaries[0] == canaries[1] == Channel.open(root).latest().canary
    assert canaries[0].output_ids == dense.output_ids
    assert canaries[0].logprobs == pytest.approx(dense.logprobs, abs=1e-5)
