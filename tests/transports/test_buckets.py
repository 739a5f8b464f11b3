"""What a transport is given to carry: whole tensors in bounded buckets, gathered when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ckptsync.config import PublisherConfig
from ckptsync.manifest import TensorSpec
from ckptsync.opening import Content, open_walks
from ckptsync.ranks import Ranks
from ckptsync.transports.base import Delivery
from ckptsync.version import VersionId
from tests.trainer.models import TinyModel, reference, same, shard
from tests.trainer.ranks_harness import returned, run_ranks


def delivery(model: Any, *, bucket_bytes: int = 2000, **config: Any) -> Delivery:
    ranks, settings = Ranks(timeout=60), PublisherConfig(**config)
    walks, _ = open_walks(Content(models={"model": model}).prepare(settings), settings, ranks)

    def no_files(transport: str) -> Any:
        raise NotImplementedError

    return Delivery(
        version=VersionId(1, 1), walks=walks, ranks=ranks, bucket_bytes=bucket_bytes, to_files=no_files
    )  # fmt: skip


def test_a_bucket_ends_before_the_tensor_that_would_exceed_it_and_a_larger_one_is_alone() -> None:
    sizes = [40, 40, 20, 1, 500, 99, 1, 1]
    state = {f"t{at}": torch.zeros(size, dtype=torch.uint8) for at, size in enumerate(sizes)}
    buckets = [[t.nbytes for _, t in bucket.tensors] for bucket in delivery(state, bucket_bytes=100).buckets()]
    assert buckets == [[40, 40, 20], [1], [500], [99, 1], [1]]


def test_bytes_are_counted_on_the_wire_and_the_cast_comes_before() -> None:
    state = {f"t{at}": torch.zeros(10) for at in range(4)}
    buckets = list(delivery(state, bucket_bytes=40, dtype=torch.bfloat16).buckets())
    assert [len(bucket.tensors) for bucket in buckets] == [2, 2]
    assert {tensor.dtype for bucket in buckets for _, tensor in bucket.tensors} == {torch.bfloat16}


def test_nothing_is_made_before_its_bucket_is_asked_for() -> None:
    made: list[str] = []

    class Lazy:
        def metadata(self) -> list[TensorSpec]:
            return [TensorSpec(f"t{at}", "F32", (10,)) for at in range(6)]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for at in range(6):
                made.append(f"t{at}")
                yield f"t{at}", torch.zeros(10)

    buckets = delivery(Lazy(), bucket_bytes=80).buckets()
    next(buckets)
    assert len(made) <= 3, "the tensor that did not fit is known, and no more"
    assert sum(len(bucket.tensors) for bucket in buckets) == 4


def test_it_can_be_walked_again_for_a_resend() -> None:
    again = delivery(TinyModel(), bucket_bytes=500)
    walks = [{name: tensor for bucket in again.buckets() for name, tensor in bucket.tensors} for _ in range(2)]
    same(walks[0], walks[1])
    assert [spec.name for spec in again.specs["model"]] == list(walks[0])
    assert again.nbytes == sum(tensor.nbytes for tensor in walks[0].values())
    assert again.ties == {"model": {"head.weight": "embed.weight"}}


def gathered(rank: int, kind: str) -> list[Any]:
    model: Any = TinyModel()
    if kind == "fsdp2":
        model = shard(model)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif kind == "source":
        model = Declared(model)
    elif kind == "buffers":
        model = {name: tensor + rank for name, tensor in model.state_dict().items()}
    told = []
    for everywhere in (False, True):
        sizes, state = [], {}
        for bucket in delivery(model, ties="duplicate", bucket_bytes=1000).buckets(everywhere=everywhere):
            sizes.append(len(bucket.tensors))
            state |= {name: tensor.detach().clone() for name, tensor in bucket.tensors}
        told.append((sizes, state))
    return told


class Declared:
    def __init__(self, model: nn.Module) -> None:
        self.state = model.state_dict()

    def metadata(self) -> list[TensorSpec]:
        return [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in self.state.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.state.items())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "source", "buffers"])
def test_ranks_get_the_same_buckets_on_rank_0_or_everywhere(kind: str) -> None:
    zero, one = returned(run_ranks(2, gathered, kind))
    expected = reference(TinyModel())
    same(zero[0][1], expected)
    assert one[0][1] == {}, "rank 1 keeps nothing"
    assert len(one[0][0]) == len(zero[0][0]) > 3, "and walks the same buckets"
    for sizes, state in (zero[1], one[1]):
        assert sizes == zero[0][0]
        same(state, expected)
