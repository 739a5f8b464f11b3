"""One rank's live model, brought to a staged version: by the copy plan where it is proven, else by the engine.

Whatever can be checked is checked before the model is touched. A failure after that is undone in here, from the
stage, so that a rank leaves an update with the new version, with the old one, or says that it has neither.
Knows torch, and not which engine it is in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ckptsync.engine import StagedVersion
from ckptsync.errors import BadShard, CkptSyncError, EngineDirty, EngineRefused, ProofFailed, SchemaMismatch
from ckptsync.manifest import MAIN_TRACK, TensorSpec
from ckptsync.shards.tensors import map_tensors
from watchers.proof import check_schema

from .copy_plan import CopyPlan, Layout, PlanRefused, gather, targets_of, trace
from .payload import Payload, Pieces
from .readback import differing

Weights = Iterable[tuple[str, torch.Tensor]]
Checkpoint = Mapping[str, torch.Tensor]

Path = Literal["plan", "reload"]
Proof = Literal["elements", "sums", "none"]
State = Literal["loaded", "refused", "restored", "dirty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSide:
    """What only the engine knows."""

    reload: Callable[[Weights], None]
    """Its own way to load a checkpoint into the live model. Raises, with the model well-formed but mixed."""

    base: Callable[[], Weights]
    """The weights it was started with."""

    schema: Callable[[], Mapping[str, TensorSpec] | None]
    """Names, dtypes and shapes of those."""

    unplannable: Callable[[], str] = lambda: ""
    """Why copies alone would not do: a kernel holds something derived from a parameter. Empty if they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an update ended on this rank."""

    state: State
    path: Path | None = None
    """What loaded the version that the model holds now: the copy plan, or the engine's own reload."""

    why: str = ""
    """Why it was not the plan."""

    proof: Proof = "none"
    """How the live values were compared with the staged ones: element by element, by sums on the device, or not,
    since without a plan they cannot be read back."""

    seconds: float = 0.0
    proof_seconds: float = 0.0
    error: CkptSyncError | None = None


class LiveModel:
    """The model of one rank. One thread calls `update`; `prepare` works in a thread of its own."""

    def __init__(self, model: torch.nn.Module, engine: EngineSide) -> None:
        self.model, self.engine = model, engine
        self.good: StagedVersion | None = None
        """What the model holds; None for the weights it was started with."""

        self._plan: CopyPlan | None = None
        self._why = "the first load after a start is the engine's own; the plan is proven by it"
        self._dirty = False
        self._payload = Payload()
        self._preparing: threading.Thread | None = None
        self._prepared: tuple[StagedVersion, Checkpoint] | None = None

    def prepare(self, version: StagedVersion, done: Callable[[], None]) -> None:
        """Gather what this rank needs of the version into pinned memory, while the engine serves. Returns at
        once, calls `done` from another thread; `update` waits for it. Without a proven plan, or on a CPU, there
        is nothing to gather."""
        self._wait()
        if self._plan is None or not self._on_cuda():
            done()
            return
        arguments = (self._plan, version, done)
        self._preparing = threading.Thread(target=self._prepare, args=arguments, name="ckptsync-prepare")
        self._preparing.start()

    def update(self, version: StagedVersion) -> Outcome:
        """Bring the model to the version. Never raises a CkptSyncError: the outcome says what it holds now."""
        started = time.monotonic()
        try:
            checkpoint = self._take_prepared(version) or self._checked(version)
        except CkptSyncError as error:
            return Outcome(state="dirty" if self._dirty else "refused", error=error)
        try:
            path, why, proof, proof_seconds = self._load(version, checkpoint)
        except Exception as error:  # noqa: BLE001 - whatever it was, the model has to be whole again
            return self._restore(_as_ours(error, version))
        self.good, self._dirty = version, False
        seconds = time.monotonic() - started
        return Outcome(state="loaded", path=path, why=why, proof=proof, seconds=seconds, proof_seconds=proof_seconds)

    def _checked(self, version: StagedVersion) -> Checkpoint:
        """The version's tensors, mapped, after every check that needs no model. Nothing is touched."""
        schema = self.engine.schema()
        if schema is None:
            raise EngineRefused("what this engine needs is not known, so a missing tensor would not be noticed")
        # Whether another dtype is wanted is for the watcher to say; the loaders cast.
        check_schema(version.manifest, schema, allow_cast=True)
        track = version.manifest.tracks.get(MAIN_TRACK)
        if track is None or version.manifest.kind != "full":
            raise SchemaMismatch(f"{version.label} is no full version of the model")
        try:
            return dict(map_tensors(version.folder, track))
        except OSError as error:
            raise BadShard(f"{version.folder}: {error}") from error

    def _load(self, version: StagedVersion, checkpoint: Checkpoint) -> tuple[Path, str, Proof, float]:
        targets = self._targets()
        why, pieces = self._pieces(version, checkpoint, targets)
        self._dirty = True
        if self._plan is not None and pieces is not None:
            wrong, seconds = pieces.load(self._plan, targets)
            if wrong:
                self._plan, self._why = None, f"the plan failed its proof for {wrong[0]}"
                raise ProofFailed(f"{version.label} was copied, but {len(wrong)} tensors differ ({wrong[0]}, …)")
            return "plan", "", pieces.proof, seconds
        self.engine.reload(checkpoint.items())
        started = time.monotonic()
        self._plan = self._learn(checkpoint)
        return "reload", why, "elements" if self._plan else "none", time.monotonic() - started

    def _pieces(
        self, version: StagedVersion, checkpoint: Checkpoint, targets: Mapping[str, torch.Tensor]
    ) -> tuple[str, Pieces | None]:
        """What the plan is to copy; or why it will not be the plan."""
        if self._plan is None:
            return self._why, None
        if self._dirty:
            return "the load before this one failed", None
        if self._plan.layouts != _layouts(checkpoint):
            return "the tensors have other dtypes than before", None
        try:
            found = self._payload.of(version.folder, self._plan, targets, checkpoint, self._on_cuda())
        except RuntimeError as error:
            self._payload.forget()
            return f"no pinned memory: {error}", None
        return "", found

    def _learn(self, checkpoint: Checkpoint) -> CopyPlan | None:
        """A plan that reads back what the engine itself just loaded, element by element; None if there is none."""
        try:
            if why := self.engine.unplannable():
                raise PlanRefused(f"no plan: {why}")
            plan = trace(self.model, _layouts(checkpoint))
            wrong = differing(plan, self._targets(), gather(plan, checkpoint))
        except PlanRefused as error:
            self._why = str(error)
            return None
        if wrong:
            self._why = f"no plan: after the engine's own reload {wrong[0]} does not read back as it was loaded"
            return None
        self._why = ""
        return plan

    def _restore(self, error: CkptSyncError) -> Outcome:
        """The version before again, by the engine's own reload."""
        if not self._dirty:
            return Outcome(state="refused", error=error)
        started = time.monotonic()
        try:
            if self.good is None:
                self.engine.reload(self.engine.base())
                proof: Proof = "none"
            else:
                proof = self._reload_good(self.good)
        except Exception as second:  # noqa: BLE001 - the outcome says it
            text = f"{error}; the version before could not be restored: {type(second).__name__}: {second}"
            return Outcome(state="dirty", error=EngineDirty(text))
        self._dirty = False
        seconds = time.monotonic() - started
        return Outcome(state="restored", path="reload", proof=proof, seconds=seconds, error=error)

    def _reload_good(self, good: StagedVersion) -> Proof:
        checkpoint = self._checked(good)
        self.engine.reload(checkpoint.items())
        if self._plan is None:
            return "none"
        if wrong := differing(self._plan, self._targets(), gather(self._plan, checkpoint)):
            raise ProofFailed(f"{good.label} was reloaded, but {wrong[0]} differs")
        return "elements"

    def _prepare(self, plan: CopyPlan, version: StagedVersion, done: Callable[[], None]) -> None:
        try:
            checkpoint = self._checked(version)
            self._payload.of(version.folder, plan, self._targets(), checkpoint, pinned=True)
            self._prepared = version, checkpoint
        except (CkptSyncError, RuntimeError):
            self._payload.forget()  # `update` meets the same error, and reports it
        done()

    def _take_prepared(self, version: StagedVersion) -> Checkpoint | None:
        """What `prepare` has checked and mapped already."""
        self._wait()
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0].manifest.manifest_digest != version.manifest.manifest_digest:
            return None
        return prepared[1] if prepared[0].folder == version.folder else None

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def close(self) -> None:
        self._wait()
        self._payload.forget()

    def _targets(self) -> dict[str, torch.Tensor]:
        return targets_of(self.model)

    def _on_cuda(self) -> bool:
        return next(self.model.parameters()).is_cuda


def _layouts(checkpoint: Checkpoint) -> dict[str, Layout]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint.items()}


def _as_ours(error: Exception, version: StagedVersion) -> CkptSyncError:
    if isinstance(error, CkptSyncError):
        return error
    return EngineDirty(f"loading {version.label}: {type(error).__name__}: {error}")
