"""An nn.Module in this process as an engine.

The module's own tensors are changed in place, so optimizers, compiled graphs and CUDA graphs that hold them
stay valid. Whoever computes with the module does so inside `with engine.gate:`, which waits while a version
is loaded.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import msgspec
import torch
from torch import nn

from ckptsync import canary
from ckptsync.digest import digest, sha256
from ckptsync.engine import Confirmation, EngineStatus, ReadBack, StagedVersion, Versioned
from ckptsync.errors import (
    EngineDirty,
    EngineRefused,
    EngineUnavailable,
    InvalidInput,
    ProofFailed,
    UnsupportedTensor,
)
from ckptsync.export.module import find_ties, live_tensors
from ckptsync.logs import Pool
from ckptsync.manifest import MAIN_TRACK, TensorEntry, TensorSpec, Track
from ckptsync.shards.tensors import map_tensors, spec_of, tensor_bytes

from ..proof import check_schema

PAUSE_SECONDS = 600.0

DIGESTERS = 4
"""Threads that digest what is live, while the module waits: of a model on a GPU so many tensors are on the host."""


class Gate:
    """Who computes goes in by `with gate:` and waits while it is shut; `shut` waits until everybody is
    out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    @property
    def is_shut(self) -> bool:
        return self._shut

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._shut)
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def shut(self, timeout: float) -> bool:
        """False if somebody was still inside after `timeout` seconds; the gate is open again then."""
        with self._changed:
            self._shut = True
            empty = self._changed.wait_for(lambda: self._inside == 0, timeout)
            if not empty:
                self._open()
            return empty

    def open(self) -> None:
        with self._changed:
            self._open()

    def _open(self) -> None:
        self._shut = False
        self._changed.notify_all()


class ModuleEngine(Versioned):
    """The adapter. The module must be dense and whole in this process, on any device.

    Names are the checkpoint's, as the publisher cleans them. A version's dtypes must be the module's; with
    `allow_cast` they are cast, and what was cast cannot be compared with the manifest. `pause_seconds`
    bounds the wait for computations under way.

    InvalidInput for what is no module, EngineRefused for one with a tensor that cannot be loaded into, such as on the
    meta device: materialize it first.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str = "module",
        allow_cast: bool = False,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidInput(f"an engine is made of a torch.nn.Module, not of {type(module).__name__}")
        self.module = module
        self.gate = Gate()
        self._name, self._allow_cast, self._pause_seconds = name, allow_cast, pause_seconds
        self._boot_id = uuid.uuid4().hex
        self._label = ""
        self.schema()

    @property
    def name(self) -> str:
        return self._name

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Track -> module, for transports that copy into it."""
        return {MAIN_TRACK: self.module}

    def begin(self) -> None:
        """From here on it may hold a mix: it has no label."""
        self._label = ""

    def hold(self, label: str) -> None:
        """It holds all of this version, by another way than `update`."""
        self._label = label

    def status(self) -> EngineStatus:
        return EngineStatus(label=self._label, boot_id=self._boot_id, paused=self.gate.is_shut)

    def schema(self) -> Mapping[str, TensorSpec]:
        """Parameters and persistent buffers, a tied tensor under its first name only."""
        try:
            tensors = live_tensors(self.module)
            ties = find_ties(tensors)
            return {name: spec_of(name, tensor) for name, tensor in tensors.items() if name not in ties}
        except UnsupportedTensor as error:
            raise EngineRefused(f"{self._name}: cannot be loaded into: {error}") from error

    def pause(self) -> None:
        if not self.gate.shut(self._pause_seconds):
            raise EngineUnavailable(f"{self._name}: still computing after {self._pause_seconds} s; not paused")

    def start(self, version: StagedVersion) -> None:
        """Check that it fits. SchemaMismatch or EngineRefused here leave the module as it was."""
        if version.manifest.kind != "full":
            raise EngineRefused(f"{self._name}: loads full versions, {version.label} is kind {version.manifest.kind}")
        if not self.gate.is_shut:
            raise EngineRefused(f"{self._name}: is not paused")
        check_schema(version.manifest, self.schema(), allow_cast=self._allow_cast, engine=self._name)

    def update(self, version: StagedVersion) -> None:
        """Copy into the live tensors, each once."""
        live = dict(_live(self.module, _track(version)))
        self._label = ""
        try:
            with torch.no_grad():
                for name, tensor in map_tensors(version.folder, _track(version)):
                    if (target := live.pop(name, None)) is not None:
                        target.copy_(tensor)
        except Exception as error:
            raise EngineDirty(f"{self._name}: {version.label} is half loaded: {error}") from error
        if live:
            raise EngineDirty(f"{self._name}: {version.label} gave nothing for {', '.join(sorted(live)[:3])}")

    def finish(self, version: StagedVersion) -> None:
        self._label = version.label

    def confirm(self, version: StagedVersion) -> Confirmation:
        """Digest the live tensors and compare each with the manifest. ProofFailed names the first that
        differs.

        The fingerprint is over all of them by name: equal weights give equal fingerprints, in whichever order a trainer
        wrote them.
        """
        if self._label != version.label:
            raise ProofFailed(f"{self._name}: holds {self._label or 'no version'!r}, not {version.label}")
        live = list(_by_entry(self.module, sorted(_track(version).tensors, key=_name)))
        with Pool(DIGESTERS, thread_name_prefix="ckptsync-confirm") as pool:
            digests = pool.map(lambda each: digest(tensor_bytes(each[1]), version.manifest.digest), live)
        rows, compared = [], True
        for (entry, tensor), found in zip(live, digests, strict=True):
            same_dtype = spec_of(entry.name, tensor).dtype == entry.dtype
            if same_dtype and found != entry.digest:
                raise ProofFailed(f"{self._name}: {entry.name} is not the one of {version.label}")
            compared = compared and same_dtype
            rows.append((entry.name, found))
        return Confirmation(label=self._label, fingerprint=sha256(msgspec.json.encode(rows)), read_back=compared)

    def read_back(self) -> ReadBack:
        return "values"

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        """For a causal language model. EngineRefused for a module that does not answer as those of transformers."""
        with self.gate:
            try:
                return canary.score(self.module, token_ids, first)
            except (AttributeError, TypeError, IndexError, RuntimeError) as error:
                raise EngineRefused(f"{self._name}: cannot score tokens: {type(error).__name__}: {error}") from error

    def resume(self) -> None:
        self.gate.open()

    def close(self) -> None:
        self.gate.open()


def _track(version: StagedVersion) -> Track:
    return version.manifest.tracks[MAIN_TRACK]


def _by_entry(module: nn.Module, entries: Iterable[TensorEntry]) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    """The manifest's tensors with the live ones of the same name, in their order, each live tensor once."""
    tensors = live_tensors(module)
    ties = find_ties(tensors)
    done: set[str] = set()
    for entry in entries:
        first = ties.get(entry.name, entry.name)
        if first in tensors and first not in done:
            done.add(first)
            yield entry, tensors[first]


def _name(entry: TensorEntry) -> str:
    return entry.name


def _live(module: nn.Module, track: Track) -> Iterator[tuple[str, torch.Tensor]]:
    return ((entry.name, tensor) for entry, tensor in _by_entry(module, track.tensors))
