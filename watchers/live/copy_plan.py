"""Where each checkpoint element goes in the live model, learned from the model's own `load_weights`.

    plan = trace(model, layouts)          once; the model is not touched
    payload = gather(plan, checkpoint)    views of the staged tensors, one for each copy
    apply(plan, targets_of(model), payload)

`trace` runs `load_weights` over empty checkpoint tensors and records, instead of doing, every copy into a
parameter. Whatever is more than a copy (a transposition by arithmetic, a quantization, a value that is looked
at) refuses the plan, and so does a parameter byte that would be written twice or never. A plan is a claim about
the loader, not about what the engine did with the parameters afterwards: prove it once by reading back a load
that the engine made itself (see `readback`).

Knows torch, and nothing of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckptsync.errors import EngineRefused

Layout = tuple[tuple[int, ...], torch.dtype]
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

MAX_RUNS = 1 << 24
"""A plan of more contiguous pieces than this is slower than any reload."""

_COPY = torch.ops.aten.copy_.default
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


class PlanRefused(EngineRefused):
    """The model's loader does more than copy, or leaves parameter bytes uncovered. The model was not touched."""


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def on(self, tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, self.offset + offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of a checkpoint tensor, and where they go. Both views have one shape."""

    source: str
    read: View
    target: str
    write: View


@dataclass(frozen=True, slots=True)
class Fill:
    """What the loader sets to a constant: the padding of a vocabulary. It never changes, so it is not applied."""

    target: str
    write: View
    value: float


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """All that a load does, for checkpoints of exactly these layouts."""

    layouts: Mapping[str, Layout]
    copies: tuple[Copy, ...]
    fills: tuple[Fill, ...]
    unread: tuple[str, ...]
    """Checkpoint tensors that this rank does not need: of another rank, or tied to one that it reads."""

    padding: tuple[str, ...]
    """Parameters with known padding that no load writes."""

    @property
    def numel(self) -> int:
        return sum(copy.write.numel for copy in self.copies)


def targets_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name. Shared memory may appear under several names."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data for name, tensor in named}


def trace(
    model: torch.nn.Module,
    layouts: Mapping[str, Layout],
    *,
    load: Load | None = None,
    padding: Mapping[str, int] | None = None,
) -> CopyPlan:
    """The plan for checkpoints of these layouts (name -> shape and dtype), in their order.

    `load` is the model's `load_weights` unless said. `padding` names parameters and the first of their rows that
    no load writes. Every other parameter byte is written exactly once, by a copy or by a constant. Raises
    PlanRefused, also for what the loader itself raises; the model is as before either way.
    """
    sources = {name: torch.empty(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in layouts.items()}
    recorder = _Recorder(sources, targets_of(model))
    held = {name: (parameter, parameter.data) for name, parameter in model.named_parameters()}
    try:
        with torch.no_grad(), recorder:
            (load or model.load_weights)(iter(sources.items()))  # type: ignore[operator]
    except Exception as error:
        raise recorder.refusal or PlanRefused(f"no plan: {type(error).__name__}: {error}") from error
    finally:
        replaced = _put_back(model, held)
    if recorder.refusal:
        raise recorder.refusal
    if replaced:
        raise PlanRefused(f"no plan: load_weights replaces {replaced}")
    padded = _check_coverage(model, recorder, dict(padding or {}))
    read = {copy.source for copy in recorder.copies}
    unread = tuple(name for name in layouts if name not in read)
    return CopyPlan(dict(layouts), tuple(recorder.copies), tuple(recorder.fills), unread, padded)


def gather(plan: CopyPlan, checkpoint: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """One view of the checkpoint's tensors for each copy; no bytes move."""
    for name in {copy.source for copy in plan.copies}:
        found: Layout = (tuple(checkpoint[name].shape), checkpoint[name].dtype)
        if found != plan.layouts[name] or not checkpoint[name].is_contiguous():
            raise PlanRefused(f"{name} is {found}, the plan is for {plan.layouts[name]}")
    return [
        copy.read.on(checkpoint[copy.source], int(checkpoint[copy.source].storage_offset())) for copy in plan.copies
    ]


@torch.no_grad()
def apply(plan: CopyPlan, targets: Mapping[str, torch.Tensor], payload: Iterable[torch.Tensor]) -> None:
    """Put the payload (see `gather`) into the live storages; returns when the device has it.

    Asynchronous from pinned memory. Addresses stay, so captured CUDA graphs stay valid.
    """
    devices = set()
    for copy, values in zip(plan.copies, payload, strict=True):
        live = copy.write.on(targets[copy.target])
        live.copy_(values, non_blocking=True)
        devices.add(live.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies and constants into targets, and does neither."""

    def __init__(self, sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources = _by_storage(sources)
        self.targets = _by_storage(targets)
        # By storage: a checkpoint tensor and its parameter often share a name, and not always a dtype.
        self.dtypes = _dtypes_by_storage([*sources.values(), *targets.values()])
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.refusal: PlanRefused | None = None
        self._made: dict[int, torch.Tensor] = {}  # kept alive: an address must not come back as another tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if self._is_recorded(func, written, args):
            return args[0]
        self._check_harmless(func, written, [*args, *kwargs.values()])
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            key = _key(tensor)
            if key not in self.sources and key not in self.targets:
                self._made[key] = tensor
        return result

    def _is_recorded(self, func: Any, written: list[torch.Tensor], args: Any) -> bool:
        if len(written) != 1 or _key(written[0]) not in self.targets:
            return False
        target = written[0]
        name = self._name(self.targets, target, func)
        if func is _COPY:
            self._record_copy(name, target, args[1], func)
        elif func in _FILLS:
            self.fills.append(Fill(name, View.of(target), args[1] if len(args) > 1 else 0))
        else:
            raise self._refuse(f"load_weights calls {func} on {name}")
        return True

    def _record_copy(self, name: str, target: torch.Tensor, source: torch.Tensor, func: Any) -> None:
        if _key(source) not in self.sources:
            raise self._refuse(f"what goes into {name} is computed, not copied")
        read = self._name(self.sources, source, func)
        source = source.expand(target.shape)
        self.copies.append(Copy(read, View.of(source), name, View.of(target)))

    def _name(self, names: Mapping[int, str], tensor: torch.Tensor, func: Any) -> str:
        name = names[_key(tensor)]
        if tensor.dtype != (own := self.dtypes[_key(tensor)]):
            raise self._refuse(f"{func} sees {name} as {tensor.dtype}, and it is {own}")
        return name

    def _check_harmless(self, func: Any, written: list[torch.Tensor], args: list[Any]) -> None:
        for tensor in written:
            if _key(tensor) not in self._made:
                raise self._refuse(f"load_weights calls {func} on a tensor that is no parameter or buffer")
        if func.is_view or func is torch.ops.aten.detach.default:
            return
        for tensor in _tensors(args):
            name = self.sources.get(_key(tensor))
            if name is not None and tensor.numel():
                raise self._refuse(f"load_weights calls {func} on the values of {name}")

    def _refuse(self, why: str) -> PlanRefused:
        self.refusal = self.refusal or PlanRefused(f"no plan: {why}")
        return self.refusal


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _by_storage(tensors: Mapping[str, torch.Tensor]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():  # all empty storages are at address 0
            found.setdefault(_key(tensor), name)
    return found


def _dtypes_by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, torch.dtype]:
    found: dict[int, torch.dtype] = {}
    for tensor in tensors:
        if tensor.numel():
            found.setdefault(_key(tensor), tensor.dtype)
    return found


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    specs = func._schema.arguments
    pairs = [*zip(specs, args, strict=False), *((spec, kwargs.get(spec.name)) for spec in specs[len(args) :])]
    writes = (value for spec, value in pairs if spec.alias_info is not None and spec.alias_info.is_write)
    return [tensor for value in writes for tensor in _tensors(value) if tensor.numel()]


def _put_back(model: torch.nn.Module, held: Mapping[str, tuple[torch.nn.Parameter, torch.Tensor]]) -> str:
    """`param.data = …` is no operator that a dispatch mode sees. The name of what was replaced, if any."""
    replaced = ""
    now = dict(model.named_parameters())
    for name, (parameter, data) in held.items():
        if now.get(name) is not parameter:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, parameter)
            replaced = name
        if (_key(parameter.data), View.of(parameter.data)) != (_key(data), View.of(data)):
            parameter.data, replaced = data, name
    return replaced


# -- coverage --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Storage:
    """What is needed of one storage, and what is written; runs are [start, stop) in elements."""

    needed: list[np.ndarray[Any, Any]] = field(default_factory=list)
    padding: list[np.ndarray[Any, Any]] = field(default_factory=list)
    written: list[np.ndarray[Any, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def _check_coverage(model: torch.nn.Module, recorder: _Recorder, padding: dict[str, int]) -> tuple[str, ...]:
    parameters = dict(model.named_parameters())
    storages: dict[int, _Storage] = {}
    for name, parameter in parameters.items():
        if not parameter.numel():
            raise PlanRefused(f"no plan: {name} is empty; the engine holds its values somewhere else")
        _need(storages.setdefault(_key(parameter.data), _Storage()), name, parameter.data, padding.get(name))
    pieces = [(c.target, c.write) for c in recorder.copies] + [(f.target, f.write) for f in recorder.fills]
    targets = targets_of(model)
    for target, write in pieces:
        storages.setdefault(_key(targets[target]), _Storage(names=[target])).written.append(_runs(write))
    return tuple(name for storage in storages.values() for name in _check_storage(storage))


def _need(storage: _Storage, name: str, tensor: torch.Tensor, first_padding_row: int | None) -> None:
    storage.names.append(name)
    if first_padding_row is None:
        storage.needed.append(_runs(View.of(tensor)))
        return
    storage.needed.append(_runs(View.of(tensor[:first_padding_row])))
    storage.padding.append(_runs(View.of(tensor[first_padding_row:])))


def _check_storage(storage: _Storage) -> list[str]:
    written = _sorted(storage.written)
    names = ", ".join(storage.names)
    if len(written) > 1 and (written[1:, 0] < written[:-1, 1]).any():
        raise PlanRefused(f"no plan: parts of {names} are written twice")
    covered, needed = _merged(written), _merged(_sorted(storage.needed))
    known = _merged(_sorted([covered, *storage.padding]))
    missing = _missing(needed, known)
    if missing:
        raise PlanRefused(f"no plan: {missing} elements of {names} are never written")
    return storage.names if storage.padding and _missing(_merged(_sorted(storage.padding)), covered) else []


def _runs(view: View) -> np.ndarray[Any, Any]:
    """The contiguous runs of a view as an array of [start, stop)."""
    if not view.numel:
        return np.empty((0, 2), np.int64)
    dims = sorted(((s, n) for n, s in zip(view.shape, view.stride, strict=True) if n > 1), reverse=True)
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    if math.prod(n for _, n in dims) > MAX_RUNS:
        raise PlanRefused(f"no plan: a copy of shape {view.shape} goes to more than {MAX_RUNS} places")
    starts = np.array([view.offset], np.int64)
    for stride, count in dims:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
    return np.stack([starts, starts + length], axis=1)


def _sorted(runs: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    everything = np.concatenate([np.empty((0, 2), np.int64), *runs])
    return everything[np.argsort(everything[:, 0], kind="stable")]


def _merged(runs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sorted runs, joined where they touch or overlap."""
    if not len(runs):
        return runs
    stops = np.maximum.accumulate(runs[:, 1])
    first = np.concatenate([[True], runs[1:, 0] > stops[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([runs[first, 0], stops[last]], axis=1)


def _missing(needed: np.ndarray[Any, Any], known: np.ndarray[Any, Any]) -> int:
    """How many elements of `needed` are not in `known`; both merged."""
    union = _merged(_sorted([needed, known]))
    return int((union[:, 1] - union[:, 0]).sum() - (known[:, 1] - known[:, 0]).sum())
