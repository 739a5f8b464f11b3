"""One rank's live model, brought to a staged version: by the copy plan where it is proven, else by the engine.

Whatever can be checked is checked before the model is touched. A failure after that is undone in here, from the
stage, so that a rank leaves an update with the new version, with the old one, or says that it has neither.
Knows torch, and not which engine it is in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from ckptsync.engine import StagedVersion
from ckptsync.errors import BadShard, CkptSyncError, EngineDirty, EngineRefused, ProofFailed, SchemaMismatch
from ckptsync.manifest import MAIN_TRACK, TensorSpec
from ckptsync.shards.tensors import map_tensors
from watchers.proof import check_schema

from .copy_plan import CopyPlan, Layout, PlanRefused, gather, trace
from .outcome import Outcome, Proof
from .payload import Payload, Pieces
from .places import Places
from .readback import differing

Weights = Iterable[tuple[str, torch.Tensor]]
Checkpoint = Mapping[str, torch.Tensor]


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


class LiveModel:
    """The model of one rank. One thread calls `update`; `prepare` works in a thread of its own."""

    def __init__(self, model: torch.nn.Module, engine: EngineSide) -> None:
        self.model, self.engine = model, engine
        self.good: StagedVersion | None = None
        """What the model holds; None for the weights it was started with. Not so after `overwrite`."""

        self._plan: CopyPlan | None = None
        self._read_back_once: Mapping[str, Layout] | None = None
        self._why = "the first load after a start is the engine's own; the plan is proven by it"
        self._dirty = False
        self._way_back = True
        self._payload = Payload()
        self._places = Places(model)
        self._held: int | None = None
        """Which filling of the payload the model holds, proven; None for anything else."""

        self._preparing: threading.Thread | None = None
        self._prepared: tuple[StagedVersion, Pieces] | None = None

    def prepare(self, version: StagedVersion, done: Callable[[], None]) -> None:
        """Gather what this rank needs of the version into pinned memory, and what of it changed, while the engine
        serves. Returns at once, calls `done` from another thread; `update` waits for it. Without a proven plan, or on
        a CPU, there is nothing to gather."""
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
            prepared = self._take_prepared(version)
            checkpoint = {} if prepared else self._checked(version)
        except CkptSyncError as error:
            return Outcome(state="dirty" if self._dirty else "refused", error=error)
        try:
            outcome = self._load(version, prepared, checkpoint)
        except Exception as error:  # noqa: BLE001 - whatever it was, the model has to be whole again
            return self._restore(_as_ours(error, version))
        self.good, self._dirty, self._way_back = version, False, True
        return replace(outcome, seconds=time.monotonic() - started)

    def overwrite(self) -> None:
        """Somebody else begins to write to the model: nothing leads back to what it held."""
        self._wait()
        self._dirty, self._way_back, self._held = True, False, None

    def overwritten(self) -> None:
        """They are done: it holds something whole, of which there are no files."""
        self._dirty = False

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

    def _load(self, version: StagedVersion, pieces: Pieces | None, checkpoint: Checkpoint) -> Outcome:
        targets, why = self._targets(), ""
        if pieces is None:
            why, pieces = self._pieces(version, checkpoint, targets)
        held, self._held, self._dirty = self._held, None, True
        if self._plan is not None and pieces is not None:
            return self._by_plan(version, self._plan, pieces, targets, held)
        self.engine.reload(checkpoint.items())
        started = time.monotonic()
        self._plan = self._learn(checkpoint)
        proof: Proof = "elements" if self._plan else "none"
        return Outcome(state="loaded", path="reload", why=why, proof=proof, proof_seconds=time.monotonic() - started)

    def _by_plan(
        self,
        version: StagedVersion,
        plan: CopyPlan,
        pieces: Pieces,
        targets: Mapping[str, torch.Tensor],
        held: int | None,
    ) -> Outcome:
        done = pieces.load(plan, targets, held)
        if done.wrong:
            self._plan, self._why = None, f"the plan failed its proof for {done.wrong[0]}"
            raise ProofFailed(f"{version.label} was copied, but {len(done.wrong)} tensors differ ({done.wrong[0]}, …)")
        self._held = pieces.number
        return Outcome(
            state="loaded", path="plan", why=done.why, proof=pieces.proof, proof_seconds=done.seconds, moved=done.moved
        )

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
            found = self._payload.of(
                version.folder, self._plan, targets, checkpoint, pinned=self._on_cuda(), held=self._held
            )
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
            if plan.layouts == self._read_back_once:  # so it is not the engine that keeps its weights in another way
                raise ProofFailed(f"{wrong[0]} was reloaded by the engine, and does not read back as it did before")
            return None
        self._why, self._read_back_once = "", plan.layouts
        return plan

    def _restore(self, error: CkptSyncError) -> Outcome:
        """The version before again, by the engine's own reload."""
        if not self._dirty:
            return Outcome(state="refused", error=error)
        if not self._way_back:
            return Outcome(state="dirty", error=EngineDirty(f"{error}; there are no files of what it held before"))
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
            if plan.layouts == _layouts(checkpoint):
                pieces = self._payload.of(
                    version.folder, plan, self._targets(), checkpoint, pinned=True, held=self._held
                )
                self._prepared = version, pieces
            # Here, not in the pause: to unmap 8 GB that were read takes 0.2 s (2 million pages of 4 KiB).
            del checkpoint
        except (CkptSyncError, RuntimeError):
            self._payload.forget()  # `update` meets the same error, and reports it
        done()

    def _take_prepared(self, version: StagedVersion) -> Pieces | None:
        """What `prepare` has checked and gathered already, if the plan may copy it."""
        self._wait()
        prepared, self._prepared = self._prepared, None
        if prepared is None or self._plan is None or self._dirty:
            return None
        (found, pieces), wanted = prepared, version.manifest.manifest_digest
        return pieces if (found.folder, found.manifest.manifest_digest) == (version.folder, wanted) else None

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def close(self) -> None:
        self._wait()
        self._payload.forget()

    def _targets(self) -> dict[str, torch.Tensor]:
        return self._places.tensors()

    def _on_cuda(self) -> bool:
        return next(self.model.parameters()).is_cuda


def _layouts(checkpoint: Checkpoint) -> dict[str, Layout]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint.items()}


def _as_ours(error: Exception, version: StagedVersion) -> CkptSyncError:
    if isinstance(error, CkptSyncError):
        return error
    return EngineDirty(f"loading {version.label}: {type(error).__name__}: {error}")
