"""One change of version on one engine: pause, load, confirm, record, resume, and the way back.

Nothing in here reads the network store. What a failure means depends on where it happens:

- before `start`, or refused by the engine without touching its weights (which is proven by reading them
  back): the old version is resumed and serves on;
- from `start` on: the last good version is loaded from the stage, confirmed and resumed;
- in a canary, which is replayed right after the resume and before the engine counts as ready: it is paused again,
  and the last good version loaded;
- in that too: the engine is left paused, since what it would serve may be a mix, and is reported as dirty.

An engine that is found paused when its watcher starts counts as dirty: the watcher before may have died in the
middle of a load. The first good load makes it whole and resumes it; if that fails and nothing is in the stage to
go back to, it stays paused. Somebody who paused it for reasons of their own finds it resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from ckptsync import logs
from ckptsync.engine import Confirmation, Engine, EngineStatus, StagedVersion
from ckptsync.errors import (
    CkptSyncError,
    EngineDirty,
    EngineRefused,
    EngineUnavailable,
    ProofFailed,
    SchemaMismatch,
)

from .health import IN_RECEIPT, Outcome, State
from .levels import Proof

log = logs.get(__name__)

RESUME_TRIES = 3

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the engine stands on before a change."""

    status: EngineStatus
    last_good: StagedVersion | None
    """On this host still; what is loaded again if the change fails."""

    clean: bool
    """Its weights are whole now, so it may be resumed as it is."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """What came of it."""

    state: Outcome = "serving"
    error: CkptSyncError | None = None
    confirmation: Confirmation | None = None
    """Of the version that serves now, if it was loaded in this attempt."""

    died: bool = False
    """The engine did not answer any more, or was another process, from the load on."""

    silent: bool = False
    """It did not answer when it was last asked."""

    computes: bool = False
    """It was to be paused and was not."""

    interrupt: BaseException | None = None
    """Such as KeyboardInterrupt; to be raised again once the attempt is written down."""

    paused: bool = False
    """It could not be resumed although its weights are proven: to be tried again."""

    unproven: bool = False
    """Not resumed, it could not be asked for its canary: to be loaded again once it hears."""

    pause_seconds: float = 0.0
    load_seconds: float = 0.0

    @property
    def left(self) -> str:
        """What the engine is in, after an attempt that ended dirty."""
        if self.silent:
            return "does not answer"
        if self.computes:
            return "could not be paused"
        return "was restarted in mid-load" if self.died else "is left paused, its weights may be mixed"


class Switch:
    """Changes versions on one engine. `on_state` is told of each state as it is entered."""

    def __init__(self, engine: Engine, proof: Proof, on_state: Callable[[State], None]) -> None:
        self.engine, self.proof, self._on_state = engine, proof, on_state

    def to(self, version: StagedVersion, ground: Ground) -> Attempt:
        """Bring the engine to `version`. Raises nothing: the attempt says what happened.

        An interrupt (KeyboardInterrupt) takes the way back too; a second one, during that, leaves the engine
        paused and dirty.
        """
        attempt = Attempt()
        self._prepare(attempt, version, ground)
        if attempt.error is not None:
            return attempt
        unheard: Outcome = "refused" if ground.clean else "dirty"
        self._under_pause(attempt, version, lambda: self._load(attempt, version, ground), unheard)
        if attempt.state == "serving" and not self._passes_probation(attempt, version):
            self._under_pause(attempt, version, lambda: self._reload(attempt, ground), "dirty")
        if attempt.state == "failed" and ground.last_good and not self._passes_probation(attempt, ground.last_good):
            self._under_pause(attempt, version, lambda: None, "dirty")
        return attempt

    def resume(self, attempt: Attempt) -> None:
        """Its weights are proven, so it must compute again; an engine that does not hear is told again
        later."""
        for _ in range(RESUME_TRIES):
            try:
                self._call(self.engine.resume)
            except CkptSyncError as error:
                attempt.paused, failure = True, error
            except BaseException as interrupt:  # noqa: BLE001 - raised again by the caller
                attempt.interrupt, attempt.paused = interrupt, True
                failure = EngineUnavailable(f"{type(interrupt).__name__} while it was being resumed")
            else:
                attempt.paused = False
                return
        log.error("%s: cannot be resumed: %s", self.engine.name, failure, extra={"event": "not-resumed"})
        attempt.error = attempt.error or failure

    def _prepare(self, attempt: Attempt, version: StagedVersion, ground: Ground) -> None:
        """Some adapters can get ready while the engine serves. What goes wrong there touched nothing: no pause."""
        prepare: Callable[[StagedVersion], object] | None = getattr(self.engine, "prepare", None)
        if prepare is None:
            return
        try:
            self._call(prepare, version)
        except CkptSyncError as error:
            attempt.state, attempt.error = "refused" if ground.clean else "dirty", error
            attempt.silent = isinstance(error, EngineUnavailable)

    def _under_pause(
        self, attempt: Attempt, version: StagedVersion, work: Callable[[], None], unheard: Outcome
    ) -> None:
        """Pause, work, and resume unless that left the engine dirty; `unheard` is the outcome if it does not pause."""
        attempt.state, started = unheard, time.monotonic()
        self._on_state("paused")
        try:
            if self._pause(attempt):
                work()
        except BaseException as interrupt:  # noqa: BLE001 - raised again by the caller
            self._interrupted(attempt, interrupt, version)
        if attempt.state != "dirty":
            self.resume(attempt)
        attempt.pause_seconds += time.monotonic() - started

    def _pause(self, attempt: Attempt) -> bool:
        try:
            self._call(self.engine.pause)
        except CkptSyncError as error:
            attempt.silent, attempt.computes = isinstance(error, EngineUnavailable), True
            attempt.error = attempt.error or error
            return False
        attempt.silent = attempt.computes = False
        return True

    def _passes_probation(self, attempt: Attempt, version: StagedVersion) -> bool:
        """Whether the engine, now that it computes again, gives the version's canary."""
        canary = self.proof.canary(version)
        attempt.unproven = canary is not None and attempt.paused
        if canary is None or attempt.paused:
            return True
        self._on_state("probation")
        try:
            self._call(self.proof.after_resume, version, canary, self.engine)
        except CkptSyncError as error:
            log.warning(
                "%s: %s is taken back: %s", self.engine.name, version.label, error, extra=_in_receipt(version, error)
            )
            attempt.error, attempt.silent = attempt.error or error, isinstance(error, EngineUnavailable)
        except BaseException as interrupt:  # noqa: BLE001 - raised again by the caller
            self._interrupted(attempt, interrupt, version)
        else:
            return True
        attempt.confirmation = None
        return False

    def _load(self, attempt: Attempt, version: StagedVersion, ground: Ground) -> None:
        attempt.state, started = "dirty", time.monotonic()
        try:
            attempt.confirmation = self._change(version, ground.status.boot_id)
            attempt.state = "serving"
            self._on_state("recorded")
        except CkptSyncError as error:
            attempt.error = error
            log.warning(
                "%s: %s was not loaded: %s", self.engine.name, version.label, error, extra=_in_receipt(version, error)
            )
            self._go_back(attempt, error, ground)
        except BaseException as interrupt:  # noqa: BLE001 - raised again by the caller
            self._interrupted(attempt, interrupt, version)
            if attempt.state != "serving":
                self._reload(attempt, ground)
        finally:
            attempt.load_seconds = time.monotonic() - started

    def _interrupted(self, attempt: Attempt, interrupt: BaseException, version: StagedVersion) -> None:
        attempt.interrupt = interrupt
        attempt.error = EngineDirty(f"{type(interrupt).__name__} while {version.label} was being loaded")

    def _change(self, version: StagedVersion, boot_id: str) -> Confirmation:
        self._on_state("loading")
        self._call(self.engine.start, version)
        self._call(self.engine.update, version)
        try:
            self._call(self.engine.finish, version)
        except EngineRefused as error:
            raise EngineDirty(f"{version.label} is in, but the engine would not finish: {error}") from error
        confirmation = self.proof.after_load(version, self._call(self.engine.confirm, version))
        if self._call(self.engine.status).boot_id != boot_id:
            raise ProofFailed(f"the engine was restarted while {version.label} was loaded")
        self._on_state("confirmed")
        return confirmation

    def _go_back(self, attempt: Attempt, error: CkptSyncError, ground: Ground) -> None:
        if isinstance(error, EngineRefused | SchemaMismatch) and self._is_untouched(ground):
            attempt.state = "refused"
        else:
            self._reload(attempt, ground)

    def _is_untouched(self, ground: Ground) -> bool:
        if not ground.clean:
            return False
        try:
            now = self._call(self.engine.status)
            if ground.last_good is not None and ground.last_good.label == ground.status.label:
                self.proof.after_load(ground.last_good, self._call(self.engine.confirm, ground.last_good))
        except CkptSyncError as error:
            log.warning(
                "%s says it refused, but its weights are in doubt: %s",
                self.engine.name,
                error,
                extra={"event": "in-doubt"},
            )
            return False
        return (now.boot_id, now.label) == (ground.status.boot_id, ground.status.label)

    def _reload(self, attempt: Attempt, ground: Ground) -> None:
        """The last good version again, from the stage; the state stays dirty if there is none or it fails."""
        try:
            attempt.died = self._call(self.engine.status).boot_id != ground.status.boot_id
            if ground.last_good is None or attempt.died:
                return
            attempt.confirmation = self._change(ground.last_good, ground.status.boot_id)
            attempt.state = "failed"
        except CkptSyncError as error:
            attempt.silent = isinstance(error, EngineUnavailable)
            attempt.died = attempt.died or attempt.silent
            log.error(
                "%s: the last good version could not be loaded either: %s",
                self.engine.name,
                error,
                extra={"event": "not-brought-back"},
            )

    def _call(self, step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """An adapter's own bug counts as the worst that an adapter may say."""
        try:
            return step(*args, **kwargs)
        except CkptSyncError:
            raise
        except Exception as error:
            raise EngineDirty(f"{self.engine.name}: {type(error).__name__}: {error}") from error


def _in_receipt(version: StagedVersion, error: CkptSyncError) -> dict[str, Any]:
    return logs.about(version.manifest.id, event="not-loaded", kind=error.kind, **IN_RECEIPT)
