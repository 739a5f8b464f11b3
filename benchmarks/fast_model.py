"""What the trainers of the GPU benchmarks train: random weights of one shape, whole on one GPU or sharded by FSDP2."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from benchmarks.in_worker import summed
from benchmarks.shapes import layers_of

Limits = Sequence[tuple[str, Callable[[], Any]]]


class Model(Protocol):
    nbytes: int
    local_nbytes: int
    """Of this rank's share."""

    def published(self) -> Any: ...

    def train(self, step: int) -> None:
        """Change every weight."""
        ...

    def sums(self) -> dict[str, float]:
        """Of each parameter as the engine has it. Collective."""
        ...

    def limits(self) -> Limits:
        """What a sync cannot be faster than, by name. Collective."""
        ...

    def meet(self) -> None:
        """All ranks are here."""
        ...


class Dense:
    """A dict of tensors on one GPU."""

    def __init__(self, shape: dict[str, Any], args: argparse.Namespace) -> None:
        self._weights = dict(_made(shape, "cpu" if args.dry else "cuda"))
        self.nbytes = self.local_nbytes = sum(tensor.nbytes for tensor in self._weights.values())

    def published(self) -> dict[str, torch.Tensor]:
        return self._weights

    def train(self, step: int) -> None:
        for tensor in self._weights.values():
            tensor.mul_(1.0 + 0.01 * step)

    def sums(self) -> dict[str, float]:
        return summed(self._weights.items())

    def limits(self) -> Limits:
        return [("device", _copies(list(self._weights.values())))]

    def meet(self) -> None:
        """One rank."""


class Sharded:
    """A module tree with the checkpoint's names, FSDP2 by layer, each rank on a GPU of its own."""

    def __init__(self, shape: dict[str, Any], args: argparse.Namespace) -> None:
        import torch.distributed as dist

        meeting = os.path.join(args.work, "meeting")
        if not args.dry:
            torch.cuda.set_device(args.rank)
        backend = "gloo" if args.dry else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{meeting}", rank=args.rank, world_size=args.ranks)
        self._dry, self._module = args.dry, torch.nn.Module()
        for name, tensor in _made(shape, "cpu" if args.dry else "cuda"):
            _put(self._module, name, tensor)
        self._shard()
        self.nbytes = sum(parameter.nbytes for parameter in self._module.parameters())
        self.local_nbytes = sum(parameter.to_local().nbytes for parameter in self._parameters())

    def _shard(self) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu" if self._dry else "cuda", (dist.get_world_size(),))
        for layer in self._module.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self._module, mesh=mesh)

    def _parameters(self) -> list[Any]:
        return list(self._module.parameters())

    def published(self) -> torch.nn.Module:
        return self._module

    @torch.no_grad()
    def train(self, step: int) -> None:
        for parameter in self._parameters():
            parameter.to_local().mul_(1.0 + 0.01 * step)

    def sums(self) -> dict[str, float]:
        import torch.distributed as dist

        mine = summed((name, parameter.to_local()) for name, parameter in self._module.named_parameters())
        every: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, mine)
        return {name: sum(each[name] for each in every) for name in mine}

    def limits(self) -> Limits:
        shards = [parameter.to_local() for parameter in self._parameters()]
        return [("gather", self._gather), ("device", _copies(shards))]

    def _gather(self) -> None:
        """Every tensor whole on every rank, one after the other."""
        for parameter in self._parameters():
            parameter.full_tensor()

    def meet(self) -> None:
        import torch.distributed as dist

        dist.barrier()


def _made(shape: dict[str, Any], device: str) -> Any:
    generator = torch.Generator(device).manual_seed(1)
    for name, size in layers_of(shape):
        values = torch.randn(size, generator=generator, device=device).mul_(0.05).add_(1.0 if len(size) == 1 else 0.0)
        yield name, values.to(torch.bfloat16)


def _put(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, torch.nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))


def _copies(tensors: list[torch.Tensor]) -> Callable[[], None]:
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def work() -> None:
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)

    return work
