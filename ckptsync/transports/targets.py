"""The tensors of live modules as the receiving end: does a version fit, and copying into them in place.

Compiled graphs, CUDA graphs and optimizers that hold a module's tensors stay valid. Several modules make one composed
engine, a track each: what does not fit one of them is refused before any of them is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import EngineDirty, ProofFailed, SchemaMismatch
from ..export.lora import export_adapter
from ..export.module import find_ties, live_tensors
from ..manifest import Kind, TensorSpec
from ..shards.tensors import spec_of

Live = Mapping[str, torch.Tensor]

_SHOWN = 3


class Targets:
    """Where each tensor of one version goes. SchemaMismatch, naming the track, unless the version gives every module
    exactly what it needs, with its shapes and dtypes.

    `specs` and `ties` are the delivery's, by track. A tied tensor is sent once and goes to each of its names that the
    module has a tensor of its own for.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        specs: Mapping[str, Sequence[TensorSpec]],
        ties: Mapping[str, Mapping[str, str]],
        *,
        kind: Kind = "full",
        name: str = "the engine",
    ) -> None:
        if modules.keys() != specs.keys():
            raise SchemaMismatch(
                f"{name} has the tracks {_some(modules)}, the version {_some(specs)}: check track_prefix"
            )
        self._name = name
        self._left = {track: {spec.name for spec in specs[track]} for track in specs}
        self._targets = {
            track: _fit(f"{name}, track {track}", _live(module, kind), specs[track], ties.get(track, {}))
            for track, module in modules.items()
        }

    @torch.no_grad()
    def copy(self, track: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Into the live tensors, in place; each is read back. ProofFailed for one that is not what was copied."""
        for name, tensor in tensors:
            for target in self._targets[track][name]:
                if not _copy(target, tensor):
                    raise ProofFailed(f"{self._name}: {name} of track {track} is not what was copied into it")
            self._left[track].discard(name)

    def check_complete(self) -> None:
        """EngineDirty unless every tensor came."""
        left = [name for names in self._left.values() for name in sorted(names)]
        if left:
            raise EngineDirty(f"{self._name}: {len(left)} tensors did not come ({_some(left)})")

    def live(self, track: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each sent name with a live tensor that it went to, to be read back."""
        return ((name, targets[0]) for name, targets in self._targets[track].items())


def _live(module: nn.Module, kind: Kind) -> Live:
    return live_tensors(module) if kind == "full" else export_adapter(module).tensors


def _fit(who: str, live: Live, specs: Sequence[TensorSpec], ties: Mapping[str, str]) -> dict[str, list[torch.Tensor]]:
    inner = find_ties(live)
    needed = {name: tensor for name, tensor in live.items() if name not in inner}
    names = {spec.name: [spec.name] for spec in specs}
    for alias, first in ties.items():
        names[first].append(alias)
    reach = {name: [each for each in every if each in needed] for name, every in names.items()}
    given = {spec.name: spec for spec in specs}
    problems = [
        *_told("missing", needed.keys() - {each for every in reach.values() for each in every}),
        *_told("unknown to it", [name for name, every in reach.items() if not every]),
        *_told("of another shape or dtype", [each for name, every in reach.items() for each in every
                                             if spec_of(name, needed[each]) != given[name]]),
    ]  # fmt: skip
    if problems:
        raise SchemaMismatch(f"the version does not fit {who}: {'; '.join(problems)}")
    return {name: [needed[each] for each in every] for name, every in reach.items()}


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether the target then has the very bits."""
    part = tensor.detach().to(target.device)
    if isinstance(target, DTensor):
        # Every rank has the whole tensor, so each takes its own part, without a message.
        part = distribute_tensor(part, target.device_mesh, target.placements, src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(part)
    return torch.equal(_bits(target), _bits(part))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Not the values: NaN is not equal to itself.
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _told(what: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    return [f"{len(found)} {what} ({_some(found)})"] if found else []


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
