"""What can be published: a module, a state dict, a source of one's own, or an iterator of (name, tensor)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from ..config import Ties
from ..errors import InvalidInput
from ..manifest import TensorSpec
from ..ranks import Ranks
from ..shards.hf_folder import scan_checkpoint
from ..shards.tensors import checkpoint_tensors
from .module import StateTensors, dict_tensors, find_ties, module_tensors
from .names import layer_order
from .stream import describe, stream_known, stream_pulled, wire_spec


@runtime_checkable
class WeightSource(Protocol):
    """A source that knows what it will yield. Every rank walks its own in the same order.

    class Halves:
        def __init__(self, model): self.state = model.state_dict()
        def metadata(self): return [TensorSpec(n, "F16", tuple(t.shape)) for n, t in self.state.items()]
        def __iter__(self): return ((n, t.half()) for n, t in self.state.items())
    """

    def metadata(self) -> Sequence[TensorSpec]:
        """Every tensor in walk order, as it will be yielded: name, safetensors dtype, full shape."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, in the order of `metadata`. DTensors are gathered by the caller, on all ranks.

        Plain tensors are full ones, and only rank 0's are used. May do collectives of its own, in lockstep;
        it runs in a side thread, so that a rank that fails does not leave the others stuck in there.
        """
        ...


Publishable = nn.Module | Mapping[str, torch.Tensor] | WeightSource | Iterable[tuple[str, torch.Tensor]]


class CheckpointSource:
    """A Hugging Face folder as a source, mapped: what the engines would load from it, in layer order.

    NotFound if there is no checkpoint in it, BadShard if it is not whole.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._specs = scan_checkpoint(folder).tensors

    def metadata(self) -> Sequence[TensorSpec]:
        return [self._specs[name] for name in layer_order(self._specs)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = dict(checkpoint_tensors(self._folder))
        return ((name, tensors.pop(name)) for name in layer_order(self._specs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One walk over a source, in lockstep on every rank."""

    specs: tuple[TensorSpec, ...] | None
    """What will be written, in walk order, with the dtype on the wire; None for an iterator."""

    ties: Mapping[str, str]
    """Further names of tied weights -> the name of the tensor whose bytes they share."""

    removed: tuple[str, ...]
    """Wrapper parts that were taken off names, for the manifest."""

    tensors: Iterator[tuple[str, torch.Tensor]]
    """Full CPU tensors on the writer. On other ranks nothing, but it must be walked to its end as well."""


def open_source(
    model: Publishable,
    ranks: Ranks,
    *,
    dtype: torch.dtype | None = None,
    ties: Ties = "omit",
    bucket_bytes: int = 64 << 20,
) -> Walk:
    """Collective. RanksDisagree, with the first difference, if ranks would walk different tensors.

    Also raises InvalidInput, InvalidName, DuplicateName or UnsupportedTensor, all before the first gather.
    """
    if isinstance(model, nn.Module):
        return _known(module_tensors(model), ranks, dtype, ties, bucket_bytes)
    if isinstance(model, Mapping):
        return _known(dict_tensors(model), ranks, dtype, ties, bucket_bytes)
    if isinstance(model, WeightSource):
        specs = tuple(model.metadata())
        ranks.same([describe(spec) for spec in specs], "the tensors to publish")
        tensors = stream_pulled(model, ranks, None, bucket_bytes, specs)
        return Walk(specs=specs, ties={}, removed=(), tensors=tensors)
    if isinstance(model, Iterable):
        return Walk(specs=None, ties={}, removed=(), tensors=stream_pulled(model, ranks, dtype, bucket_bytes, None))
    raise InvalidInput(f"cannot publish {type(model).__name__}: pass a module, a state dict or (name, tensor) pairs")


def _known(state: StateTensors, ranks: Ranks, dtype: torch.dtype | None, ties: Ties, bucket_bytes: int) -> Walk:
    specs = {name: wire_spec(name, tensor, dtype) for name, tensor in state.tensors.items()}
    ranks.same([describe(spec) for spec in specs.values()], "the tensors to publish")
    # Rank 0's ties count: a rank that holds no rows of a sharded tensor cannot see that two are one.
    tied = ranks.broadcast(find_ties(state.tensors) if ranks.is_writer else {})
    written = [(spec, state.tensors[name]) for name, spec in specs.items() if ties == "duplicate" or name not in tied]
    return Walk(
        specs=tuple(spec for spec, _ in written),
        ties=tied,
        removed=state.removed,
        tensors=stream_known(written, ranks, dtype, bucket_bytes),
    )
