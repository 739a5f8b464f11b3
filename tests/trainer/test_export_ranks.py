"""Exports from real gloo ranks: what reaches the writer, and that the others get nothing."""

from __future__ import annotations

import pytest
import torch

from ckptsync.config import PublisherConfig
from tests.trainer.models import TinyModel, reference, same, shard
from tests.trainer.ranks_harness import returned, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def export(model: object, **options: object) -> tuple[dict[str, torch.Tensor], object]:
    from ckptsync.export import open_source
    from ckptsync.ranks import Ranks

    ranks = Ranks(timeout=30)
    with ranks.together():
        walk = open_source(model, ranks, **options)
        found = dict(walk.tensors)
    ranks.close()
    return found, walk


def only_on_the_writer(rank: int, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    if rank == 0:
        same(found, expected)
    else:
        assert found == {}


def export_fsdp2(rank: int) -> None:
    expected = reference(TinyModel())
    del expected["head.weight"]

    model = shard(TinyModel())
    found, walk = export(model)
    only_on_the_writer(rank, found, expected)
    assert [spec.name for spec in walk.specs] == list(expected), "module order"
    assert walk.ties == {"head.weight": "embed.weight"}

    bf16, walk = export(model, dtype=torch.bfloat16, bucket_bytes=256)
    only_on_the_writer(rank, bf16, {name: tensor.bfloat16() for name, tensor in expected.items()})
    assert {spec.dtype for spec in walk.specs} == {"BF16"}

    twice, _ = export(model, ties="duplicate")
    only_on_the_writer(rank, twice, reference(TinyModel()))

    model(torch.arange(16))  # leaves the root gathered: its parameters are plain tensors now
    after_forward, _ = export(model)
    only_on_the_writer(rank, after_forward, expected)


@pytest.mark.parametrize("count", [2, 4])
def test_case_64_an_fsdp2_export_equals_the_dense_weights_bit_for_bit_also_where_ranks_hold_no_rows(
    count: int,
) -> None:
    returned(run_ranks(count, export_fsdp2))


def export_other_shapes(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    dense = {
        "rows": torch.rand(5, 3),
        "columns": torch.rand(3, 6),
        "one": torch.rand(1, 4),
        "whole": torch.rand(2, 2),
        "plain": torch.arange(7),
        "empty": torch.empty(0, 4),
    }
    state = {
        "rows": distribute_tensor(dense["rows"], mesh, [Shard(0)]),
        "columns": distribute_tensor(dense["columns"], mesh, [Shard(1)]),
        "one": distribute_tensor(dense["one"], mesh, [Shard(0)]),
        "whole": distribute_tensor(dense["whole"], mesh, [Replicate()]),
        "plain": dense["plain"],
        "empty": distribute_tensor(dense["empty"], mesh, [Shard(0)]),
    }
    only_on_the_writer(rank, export(state)[0], dense)
    only_on_the_writer(rank, export(iter(state.items()), bucket_bytes=64)[0], dense)

    halves = dense["whole"].new_ones(4, 2)
    partial = DTensor.from_local(halves, mesh, [Partial()])
    only_on_the_writer(rank, export({"sum": partial})[0], {"sum": 4 * halves})

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    block = TinyModel(blocks=1).layers[0]
    expected = reference(block, torch.bfloat16)
    parallelize_module(block, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    from torch.distributed.fsdp import fully_shard

    fully_shard(block, mesh=grid["dp"])
    only_on_the_writer(rank, export(block, dtype=torch.bfloat16)[0], expected)

    reused = torch.empty(4)

    def generator():
        for number in range(9):
            yield f"t{number}", reused.fill_(number)

    only_on_the_writer(rank, export(generator())[0], {f"t{n}": torch.full((4,), float(n)) for n in range(9)})


def test_tensor_parallel_weights_state_dicts_and_generators_are_gathered_whole() -> None:
    returned(run_ranks(4, export_other_shapes))


def grow(rank: int) -> dict[str, int]:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from ckptsync.export import open_source
    from ckptsync.ranks import Ranks

    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, device="meta") for _ in range(128)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(1.0)
    ranks = Ranks(timeout=30)
    list(open_source(fully_shard(nn.Linear(8, 8)), ranks).tensors)  # first use loads libraries
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before, total = memory("VmRSS"), 0
    for _, tensor in open_source(model, ranks, bucket_bytes=PublisherConfig().bucket_bytes // 8).tensors:
        total += tensor.nbytes
        del tensor
    return {"grew": memory("VmHWM") - before, "total": total}


def memory(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def test_case_62_neither_the_writer_nor_another_rank_ever_holds_the_whole_model() -> None:
    writer, other = returned(run_ranks(2, grow))
    assert writer["total"] == 512 << 20
    # A bucket of 8 MiB, what a gather needs, and malloc's arenas: measured 35 to 70 MiB, whatever the model's
    # size.
    assert writer["grew"] < 128 << 20
    assert other["grew"] < 128 << 20
    assert other["total"] == 0
