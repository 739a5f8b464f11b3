"""Every kind of sharding, from real ranks: what is published equals a reference gather bit for bit, in the
foreground and from a background snapshot, whoever writes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import nn

from ckptsync.channel import Channel
from ckptsync.errors import UnsupportedTensor
from ckptsync.manifest import Manifest, TensorSpec
from ckptsync.publish import Publisher
from ckptsync.shards.tensors import load_tensors
from tests.trainer.models import Block, TinyModel, reference, same, shard
from tests.trainer.ranks_harness import returned, run_ranks

State = dict[str, torch.Tensor]


def loaded(root: str, manifest: Manifest, track: str = "model") -> State:
    folder = os.path.join(root, manifest.folder)
    return dict(load_tensors(folder if track == "model" else f"{folder}/{track}", manifest.tracks[track], verify=True))


# -- kinds of models; each returns the model and what its weights are ----------------------------------------


def dense() -> tuple[nn.Module, State]:
    return TinyModel(), reference(TinyModel())


def frozen() -> tuple[nn.Module, State]:
    model = shard(TinyModel().requires_grad_(False))
    return model, reference(TinyModel())


def ddp() -> tuple[nn.Module, State]:
    model = nn.parallel.DistributedDataParallel(TinyModel(), broadcast_buffers=False)
    with torch.no_grad():  # statistics that drift apart: rank 0's are the ones that count
        model.module.layers[0].scale += torch.distributed.get_rank()
    return model, reference(TinyModel())


def fsdp1(use_orig_params: bool, strategy: str = "FULL_SHARD") -> tuple[nn.Module, State]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        TinyModel(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
    )
    model(torch.arange(16))  # lazy init, and leaves some units gathered
    return model, reference(TinyModel())


def fsdp2() -> tuple[nn.Module, State]:
    model = shard(TinyModel())
    model(torch.arange(16))  # leaves the root gathered
    return model, reference(TinyModel())


def hybrid_fsdp1() -> tuple[nn.Module, State]:
    """Sharded inside a half of the ranks, replicated over the halves."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = FullyShardedDataParallel(
        TinyModel(),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", halves(), mesh_dim_names=("replicate", "shard")),
        device_id=torch.device("cpu"),
    )
    return model, reference(TinyModel())


def hybrid_fsdp2() -> tuple[nn.Module, State]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = TinyModel()
    mesh = init_device_mesh("cpu", halves(), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), reference(TinyModel())


def halves() -> tuple[int, int]:
    size = torch.distributed.get_world_size()
    return (2, size // 2) if size > 2 else (1, size)


def tensor_parallel() -> tuple[nn.Module, State]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = TinyModel()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model, mesh, {"five": ColwiseParallel(), "one": ColwiseParallel()})
    return model, reference(TinyModel())


def two_dimensions() -> tuple[nn.Module, State]:
    """FSDP2 over tensor parallel, with the ranks of one half of each tensor far apart; TP-only in places."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = TinyModel(blocks=3)
    size = torch.distributed.get_world_size()
    grid = init_device_mesh("cpu", (2, size // 2) if size > 2 else (size, 1), mesh_dim_names=("dp", "tp"))
    for at, layer in enumerate(model.layers):
        parallelize_module(layer, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if at:  # the first layer has tensor parallel alone: DTensors that live on a part of the ranks
            fully_shard(layer, mesh=grid["dp"])
    return model, reference(TinyModel(blocks=3))


def sharded_buffers() -> tuple[nn.Module, State]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(1)
    expected = {
        "rows": torch.rand(5, 3), "columns": torch.rand(3, 6), "one": torch.rand(1, 4), "whole": torch.rand(2, 2),
        "none": torch.empty(0, 4), "scalar": torch.tensor(3.0), "ids": torch.arange(7),
    }  # fmt: skip
    places = {"rows": Shard(0), "columns": Shard(1), "one": Shard(0), "whole": Replicate(), "none": Shard(0)}
    model = nn.Module()
    for name, tensor in expected.items():
        value = distribute_tensor(tensor, mesh, [places[name]]) if name in places else tensor
        model.register_buffer(name, value)
    return model, expected


KINDS: dict[str, Callable[[], tuple[nn.Module, State]]] = {
    "dense": dense,
    "frozen": frozen,
    "ddp": ddp,
    "fsdp1, flat": lambda: fsdp1(False),
    "fsdp1, original parameters": lambda: fsdp1(True),
    "fsdp1, not sharded": lambda: fsdp1(True, "NO_SHARD"),
    "fsdp1, hybrid": hybrid_fsdp1,
    "fsdp2": fsdp2,
    "fsdp2, hybrid": hybrid_fsdp2,
    "tensor parallel": tensor_parallel,
    "two dimensions": two_dimensions,
    "buffers": sharded_buffers,
}


def publish_every_kind(rank: int, root: str) -> list[tuple[str, str]]:
    warnings.simplefilter("ignore")  # FSDP1 says that it is old
    digests = []
    with Publisher(root, shard_bytes=2000, bucket_bytes=512) as alone:
        for kind, make in KINDS.items():
            model, expected = make()
            digests.append((kind, check(rank, root, alone.publish(model).manifest, expected)))
            assert check(rank, root, alone.publish(model, background=True).result().manifest, expected)
    with Publisher(root, shard_bytes=2000, bucket_bytes=512, writers="all", dtype=torch.bfloat16) as together:
        for kind, make in KINDS.items():
            model, expected = make()
            half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in expected.items()}
            first = together.publish(model, metadata={"kind": kind})
            check(rank, root, first.manifest, half)
            again = together.publish(model, background=True).result()
            assert not again.changed, kind
            check(rank, root, again.manifest, half)
    return digests


def check(rank: int, root: str, manifest: Manifest, expected: State) -> str:
    if rank == 0:
        same(loaded(root, manifest), expected)
    return manifest.content_digest


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_case_64_every_kind_of_sharding_is_published_bit_for_bit(count: int, tmp_path: object) -> None:
    root = str(tmp_path)
    facts = returned(run_ranks(count, publish_every_kind, root, deadline=280))
    assert all(fact == facts[0] for fact in facts)
    digests = dict(facts[0])
    names = ["dense", "ddp", "fsdp1, flat", "fsdp1, original parameters", "fsdp1, not sharded", "fsdp2"]
    assert len({digests[name] for name in names}) == 1, "the same model, whoever holds it"


def test_a_module_that_has_no_values_yet_is_refused_by_name(tmp_path: object) -> None:
    with torch.device("meta"):
        model = TinyModel(blocks=1)
    with Publisher(str(tmp_path)) as publisher, pytest.raises(UnsupportedTensor, match=r"'embed\.weight'.*meta device"):
        publisher.publish(model)


# -- sources that convert themselves -------------------------------------------------------------------------

STACKED = {"mlp.experts": torch.arange(24.0).view(3, 2, 4), "attn.qkv": torch.arange(18.0).view(6, 3)}
SPLIT = {f"mlp.experts.{n}.weight": STACKED["mlp.experts"][n] for n in range(3)} | {
    f"attn.{part}": STACKED["attn.qkv"][2 * n : 2 * n + 2] for n, part in enumerate("qkv")
}


def split(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if name == "mlp.experts":
        return [(f"{name}.{n}.weight", expert) for n, expert in enumerate(tensor.unbind())]
    return [(f"attn.{part}", rows) for part, rows in zip("qkv", tensor.chunk(3), strict=True)]


def split_by_value(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if tensor.sum().item() >= 0:
        yield from split(name, tensor)


@dataclass
class ParamMeta:
    """What vLLM's sources describe a tensor with."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Vllm026:
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in STACKED.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(STACKED.items())

    def held_names(self) -> None:
        return None


class Vllm033:
    @cached_property
    def metadata(self) -> list[ParamMeta]:
        return Vllm026().metadata()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(STACKED.items())


class Ours:
    def metadata(self) -> list[TensorSpec]:
        return [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in STACKED.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(STACKED.items())


SOURCES = {
    "ours": Ours, "vLLM 0.26 to 0.32": Vllm026, "vLLM 0.33": Vllm033, "a generator": lambda: iter(STACKED.items()),
    "a state dict": lambda: STACKED,
}  # fmt: skip


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
def test_a_source_is_published_as_it_is_and_through_a_transform(
    make: Callable[[], object], background: bool, root: str
) -> None:
    def publish(**settings: object) -> State:
        with Publisher(root, **settings) as publisher:
            done = publisher.publish(make(), background=background)
            return loaded(root, done.result().manifest if background else done.manifest)

    same(publish(), STACKED)
    same(publish(transform=split), SPLIT)
    same(publish(transform=split_by_value), SPLIT)
    same(publish(transform=split, remap={"mlp.*": "m.*"}, remove=["attn.k"]), {
        name.replace("mlp.", "m."): tensor for name, tensor in SPLIT.items() if name != "attn.k"
    })  # fmt: skip


def test_a_transform_that_knows_its_metadata_is_planned_and_one_that_does_not_is_a_stream(root: str) -> None:
    def files(transform: object) -> list[str]:
        with Publisher(root, transform=transform) as publisher:
            return [file.name for file in publisher.publish(STACKED).manifest.tracks["model"].files]

    assert files(split)[0] == "model-00001-of-00001.safetensors"
    assert files(split_by_value)[0] == "model-00001.safetensors"


def test_a_transform_that_does_not_keep_to_what_it_announced_is_refused(root: str) -> None:
    def liar(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor if tensor.is_meta else tensor.flatten())]

    with Publisher(root, transform=liar) as publisher, pytest.raises(ValueError, match="announced"):
        publisher.publish(STACKED)
    assert Channel.open(root).committed() == []


def publish_sources(rank: int, root: str) -> list[str]:
    digests = []
    for background in (False, True):
        with Publisher(root, transform=split, writers="all") as publisher:
            for make in (Ours, Vllm033, lambda: iter(STACKED.items())):
                done = publisher.publish(make(), background=background)
                digests.append((done.result() if background else done).content_digest)
    return digests


@pytest.mark.distributed
@pytest.mark.slow
def test_sources_are_walked_in_lockstep_by_all_ranks(tmp_path: object) -> None:
    digests = returned(run_ranks(2, publish_sources, str(tmp_path)))
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 1
    same(loaded(str(tmp_path), Channel.open(str(tmp_path)).latest()), SPLIT)
