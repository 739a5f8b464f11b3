"""What can be published: a module, a state dict, a source of one's own, or an iterator of (name, tensor)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..config import Ties
from ..errors import InvalidInput
from ..manifest import MAIN_TRACK, TensorSpec
from ..ranks import Ranks
from ..remap import Naming
from ..shards.hf_folder import scan_checkpoint
from ..shards.tensors import DTYPE_NAMES, TORCH_DTYPES, checkpoint_tensors
from .collect import Messages
from .module import StateTensors, dict_tensors, find_ties, module_tensors
from .names import layer_order, refuse_peft
from .pieces import Layout
from .stream import (
    Item,
    Named,
    Outputs,
    Place,
    Shares,
    Transform,
    agreed_layouts,
    describe,
    like,
    outputs_of,
    pulled_buckets,
    stream_items,
    stream_pulled,
    wire_spec,
    written,
)
from .whole import whole_items, whole_pulled


@runtime_checkable
class WeightSource(Protocol):
    """A source that knows what it will yield. Every rank walks its own in the same order.

    class Halves:
        def __init__(self, model): self.state = model.state_dict()
        def metadata(self): return [TensorSpec(n, "F16", tuple(t.shape)) for n, t in self.state.items()]
        def __iter__(self): return ((n, t.half()) for n, t in self.state.items())

    vLLM's sources are taken as they are: `metadata` may be a property, its entries may carry a torch dtype, and
    `iter_full()` may stand for `__iter__`.
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

    track: str = MAIN_TRACK
    specs: tuple[TensorSpec, ...] | None
    """What will be written, in walk order, with the dtype on the wire; None if only the walk can tell."""

    ties: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied weights -> the name of the tensor whose bytes they share."""

    removed: tuple[str, ...] = ()
    """Wrapper parts that were taken off names, for the manifest."""

    items: tuple[Item, ...] | None = None
    """What is at hand, in walk order; None for a source that is pulled, which rank 0 writes alone."""

    open: Callable[[Shares, Mapping[str, Layout] | None, Ranks, Messages | None], Iterator[Named]]
    """Start walking, on all ranks: yields full CPU tensors on the ranks that own them, in the order of their
    share. Must be walked to its end on every rank. Layouts are given for snapshots, messages where tensors
    travel as changes."""

    whole: Callable[[Ranks, int, bool], Iterator[list[Named]]]
    """Start walking, on all ranks, in buckets of so many bytes: whole tensors where the model has them, on rank 0 or
    on every rank."""

    ranks: Ranks

    @property
    def tensors(self) -> Iterator[Named]:
        """Everything on rank 0."""
        return self.open({0: self.items or ()}, None, self.ranks, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """How tensors are brought into a version. `naming` belongs to one version."""

    dtype: torch.dtype | None = None
    ties: Ties = "omit"
    bucket_bytes: int = 64 << 20
    transform: Transform | None = None
    naming: Naming = field(default_factory=lambda: Naming(()))
    peft_names: bool = False
    """Whether names of PEFT's layers are meant, as an adapter's are, and those of a source that says what it yields."""


def models_of(model: Publishable | None, tracks: Mapping[str, Publishable] | None) -> Mapping[str, Publishable]:
    """By track, from the two ways to say what is to be published."""
    if (model is None) == (tracks is None):
        raise InvalidInput("publish either a model or tracks")
    return {MAIN_TRACK: model} if model is not None else dict(tracks or {})


def open_source(model: Publishable, ranks: Ranks, **how: Any) -> Walk:
    """Collective; `how` are fields of Export. The one walk of a model that is one track. See `open_tracks`."""
    return open_tracks({MAIN_TRACK: model}, ranks, Export(**how))[0]


def open_tracks(models: Mapping[str, Publishable], ranks: Ranks, how: Export) -> list[Walk]:
    """Collective. RanksDisagree, with the first difference, if ranks would walk different tensors.

    Also raises InvalidInput, InvalidName, DuplicateName or UnsupportedTensor, all before the first gather.
    """
    # One exchange fewer where there is but the one model, as nearly always: each costs milliseconds of training.
    tracks = [] if list(models) == [MAIN_TRACK] else [f"the tracks {', '.join(models)}"]
    walks = [walk for track, model in models.items() for walk in _open(track, model, ranks, how, tracks)]
    if twice := {walk.track for walk in walks if [w.track for w in walks].count(walk.track) > 1}:
        raise InvalidInput(f"two models go into the track {min(twice)!r}: give each its own")
    if all(walk.specs is not None for walk in walks):
        how.naming.check_used()
    return walks


def _open(track: str, model: Publishable, ranks: Ranks, how: Export, tracks: list[str]) -> list[Walk]:
    if isinstance(model, nn.Module):
        return _known(track, module_tensors(model), ranks, how, tracks)
    if isinstance(model, Mapping):
        return _known(track, dict_tensors(model), ranks, how, tracks)
    if how.naming.splits:
        raise InvalidInput("track_prefix splits modules and state dicts: yield a source's tracks by `tracks=`")
    if hasattr(model, "metadata"):
        return [_declared(track, model, ranks, how, tracks)]
    if isinstance(model, Iterable):
        ranks.same(tracks, "the tracks to publish")
        return [_pulled(track, lambda: iter(model), None, {}, ranks, how)]
    raise InvalidInput(f"cannot publish {type(model).__name__}: pass a module, a state dict or (name, tensor) pairs")


def _known(track: str, state: StateTensors, ranks: Ranks, how: Export, tracks: list[str]) -> list[Walk]:
    specs = {name: wire_spec(name, weight, how.dtype) for name, weight in state.tensors.items()}
    ranks.same([*tracks, *(describe(spec) for spec in specs.values())], "the tensors to publish")
    items: dict[str, list[Item]] = {}
    for name, spec in specs.items():
        found: set[str] = set()
        place = _placer(how, track, found)
        model = like(state.tensors[name], how.dtype) if how.transform else None
        outputs = _same(spec, place) if model is None else outputs_of(name, model, how.transform, place)
        if outputs == ():
            continue
        if len(found) > 1:
            raise InvalidInput(f"transform of {name!r}: yields tensors of several tracks ({', '.join(sorted(found))})")
        items.setdefault(found.pop() if found else track, []).append(
            Item(name=name, weight=state.tensors[name], outputs=outputs)
        )
    return [_walk(each, kept, state.removed, ranks, how) for each, kept in (items or {track: []}).items()]


def _placer(how: Export, track: str, found: set[str] | None = None) -> Place:
    def place(name: str) -> str | None:
        if (placed := how.naming(name, track)) is None:
            return None
        if not how.peft_names:
            refuse_peft(name, placed.name)
        if found is not None:
            found.add(placed.track)
        return placed.name

    return place


def _same(spec: TensorSpec, place: Place) -> Outputs:
    final = place(spec.name)
    return () if final is None else ((spec.name, TensorSpec(final, spec.dtype, spec.shape)),)


def _walk(track: str, items: list[Item], removed: tuple[str, ...], ranks: Ranks, how: Export) -> Walk:
    ties = {} if how.transform else _ties(items, ranks)
    kept = tuple(
        item for item in items if how.ties == "duplicate" or not item.outputs or item.outputs[0][1].name not in ties
    )
    place = _placer(how, track)

    def open_(
        shares: Shares, layouts: Mapping[str, Layout] | None, ranks: Ranks, messages: Messages | None
    ) -> Iterator[Named]:
        lies = layouts
        if lies is None:
            lies = agreed_layouts(kept, ranks, snapshot=False, by_messages=messages is not None)
        return stream_items(shares, lies, ranks, how.dtype, how.bucket_bytes, how.transform, place, messages)

    def whole(ranks: Ranks, limit: int, everywhere: bool) -> Iterator[list[Named]]:
        return whole_items(kept, ranks, limit, everywhere, how.dtype, how.transform, place)

    return Walk(
        track=track, specs=_specs(kept), ties=ties, removed=removed, items=kept, open=open_, whole=whole, ranks=ranks
    )


def _ties(items: Sequence[Item], ranks: Ranks) -> dict[str, str]:
    # Rank 0's ties count: a rank that holds no rows of a sharded tensor cannot see that two are one.
    finals = {item.outputs[0][1].name: item.weight for item in items if item.outputs}
    return ranks.broadcast(find_ties(finals) if ranks.is_writer else {})


def _specs(items: Sequence[Item]) -> tuple[TensorSpec, ...] | None:
    specs: list[TensorSpec] = []
    for item in items:
        if item.outputs is None:
            return None
        specs += (spec for _, spec in item.outputs)
    return tuple(specs)


def _declared(track: str, source: Any, ranks: Ranks, how: Export, tracks: list[str]) -> Walk:
    how = replace(how, peft_names=True)
    specs = tuple(_as_spec(entry) for entry in _metadata(source))
    ranks.same([*tracks, *(describe(spec) for spec in specs)], "the tensors to publish")
    place = _placer(how, track)
    outputs = {spec.name: _declared_outputs(spec, how.transform, place) for spec in specs}
    begin = source.iter_full if hasattr(source, "iter_full") else source.__iter__
    return _pulled(track, begin, specs, outputs, ranks, how)


def _metadata(source: Any) -> Iterable[Any]:
    held = source.held_names() if hasattr(source, "held_names") else None
    if held is not None:
        raise InvalidInput(f"{type(source).__name__} holds only a part of the model on each rank: gather it first")
    found: Iterable[Any] = source.metadata() if callable(source.metadata) else source.metadata
    return found


def _as_spec(entry: Any) -> TensorSpec:
    """Ours, or vLLM's ParamMeta, whose dtype is torch's."""
    dtype = DTYPE_NAMES.get(entry.dtype, str(entry.dtype)) if isinstance(entry.dtype, torch.dtype) else entry.dtype
    return TensorSpec(entry.name, dtype, tuple(entry.shape))


def _declared_outputs(spec: TensorSpec, transform: Transform | None, place: Place) -> Outputs | None:
    if transform is None:
        return _same(spec, place)
    return outputs_of(
        spec.name, torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta"), transform, place
    )


def _pulled(
    track: str,
    begin: Callable[[], Iterable[Named]],
    declared: tuple[TensorSpec, ...] | None,
    outputs: Mapping[str, Outputs | None],
    ranks: Ranks,
    how: Export,
) -> Walk:
    place = _placer(how, track)

    def open_(_: Shares, __: Mapping[str, Layout] | None, ranks: Ranks, ___: Messages | None) -> Iterator[Named]:
        dtype = how.dtype if declared is None else None
        for name, tensor in stream_pulled(begin, ranks, dtype, how.bucket_bytes, declared):
            yield from written(name, tensor, outputs.get(name), how.transform, place)
            del tensor

    def whole(ranks: Ranks, limit: int, everywhere: bool) -> Iterator[list[Named]]:
        dtype = how.dtype if declared is None else None
        pulled = pulled_buckets(begin, ranks, dtype, 0, declared)  # one by one: only so is a bucket never too large

        def finals(specs: Sequence[TensorSpec], tensors: Iterator[Named]) -> Iterator[tuple[TensorSpec, Named | None]]:
            made = (out for n, t in tensors for out in written(n, t, outputs.get(n), how.transform, place))
            return ((spec, next(made, None)) for each in specs for _, spec in outputs.get(each.name) or ())

        return whole_pulled((finals(*bucket) for bucket in pulled), ranks, limit, everywhere)

    known = declared is not None and None not in outputs.values()
    specs = tuple(spec for each in outputs.values() for _, spec in each or ()) if known else None
    return Walk(track=track, specs=specs, open=open_, whole=whole, ranks=ranks)
