"""One engine as its watcher knows it: what it was proven to hold, what a failed change left behind, its health.

An engine changes under a watcher's eyes: it is restarted, somebody else loads it, it misses a resume. Whatever
that is, it is ready only while it was proven to hold a version and has been told to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptsync import logs
from ckptsync.engine import Engine, EngineStatus, StagedVersion
from ckptsync.errors import EngineRefused
from ckptsync.version import VersionId

from .discover import Backoff
from .fast_path import FastPath
from .health import IN_RECEIPT, Health, State
from .levels import Proof
from .load import Attempt, Ground, Switch

log = logs.get(__name__)

Listener = Callable[[Health], None]

TAKEOVERS = 3
PEACE_SECONDS = 300.0
"""So many changes by somebody else, none after a peace of so long, are no accident: two watchers would undo each other
for ever."""


class Serving:
    """The engine between changes. `let_go` is told of each staged version that is not needed any more."""

    def __init__(
        self,
        engine: Engine,
        *,
        proof: Proof,
        let_go: Callable[[StagedVersion], None],
        retry: Backoff,
        fast_path: FastPath,
        on_change: Listener | None = None,
        on_dead: Listener | None = None,
    ) -> None:
        self.engine, self.health = engine, Health()
        self.current: StagedVersion | None = None
        """The last good version: what the engine was proven to hold, kept in the stage to go back to."""
        self._let_go, self._retry, self._retry_at = let_go, retry, 0.0
        self._on_change, self._on_dead = on_change, on_dead
        self._proof, self._switch, self._fast = proof, Switch(engine, proof, self.enter), fast_path
        self._boot_id = self._found = ""
        self._proven = False
        """The engine holds `current` now."""
        self._clean = True
        """The engine's weights are whole, whichever they are."""
        self._tried = False
        """Something was loaded here since the engine was started: a label may have come of it."""
        self._owes_resume = False
        self._reason = self.health.reason
        self._takeovers, self._contested = 0, ""
        self._settled = self._peace = 0.0

    @property
    def current_id(self) -> VersionId | None:
        return self._fast.ahead or (self.current.manifest.id if self.current is not None else None)

    @property
    def left_to_others(self) -> bool:
        """The engine is paused by somebody else: a trainer that is sending, or has let go of it for files."""
        return self._fast.at_work

    def look(self) -> tuple[EngineStatus, bool]:
        """Its status, and whether it was restarted since the last look; an owed resume is made up for.

        A restarted engine has lost what was loaded, and is not ready before it holds the current version
        again. Raises EngineRefused, until it is restarted, for one that somebody else loads again and again.
        """
        status = self.engine.status()
        if not self._boot_id:
            self._begin(status)
        restarted = status.boot_id != self._boot_id
        if restarted:
            self._begin(status)
            self._proof.forget()
        self._fast.see_pause(status.paused and self._clean and not self._owes_resume, status.label)
        if restarted:
            self._doubt(f"the engine was restarted and reports {status.label or 'no version'!r}")
        elif self._fast.at_work:
            return status, False
        elif self._fast.gave_up:
            self._clean = False
            self._doubt("the engine was left paused by somebody else, and may hold a mix")
        elif status.label != self._label and not status.paused and (self._clean or not self._tried):
            # Some engines are asked several questions: while a send ends, the answers may be of before and after it.
            if self.engine.status() != status:
                return status, False
            self._changed_by_others(status)
        if self._contested:
            raise EngineRefused(self._contested)
        if self._proven:
            self._peace = time.monotonic() - self._settled
        self._pay_resume()
        return status, restarted

    def appeared(self, version: VersionId) -> bool:
        """Whether the engine, whole, came to report it under the eyes of a watcher that has loaded nothing into it."""
        return self.current is None and self._clean and version.label != self._found

    def lost(self) -> StagedVersion | None:
        """The version that the engine should hold and does not, if it is time to load it again."""
        due = self.current is not None and not self._proven and time.monotonic() >= self._retry_at
        return self.current if due else None

    @property
    def retry_in(self) -> float:
        """Seconds until that time; infinity if nothing is lost."""
        lost = self.current is not None and not self._proven
        return max(0.0, self._retry_at - time.monotonic()) if lost else float("inf")

    def postpone(self) -> None:
        """What was lost cannot be loaded now."""
        self._retry_at = time.monotonic() + self._retry.failed()

    def change(self, version: StagedVersion, status: EngineStatus, last_good: StagedVersion | None) -> Attempt:
        """Load `version`, going back to `last_good` if that fails, and keep what the engine holds then.

        Raises nothing: an interrupt is in the attempt, for the caller to raise again.
        """
        self._boot_id, self._tried, was_clean = status.boot_id, True, self._clean
        # Paused by somebody else: whatever they did, only a complete load makes it whole.
        self._clean = self._clean and (not status.paused or self._owes_resume)
        ground = Ground(status=status, last_good=last_good, clean=self._clean)
        attempt = self._switch.to(version, ground)
        self._keep_only(self._good_after(version, ground, attempt), version, last_good)
        self._clean, self._settled, self._peace = attempt.state != "dirty", time.monotonic(), 0.0
        self._proven = attempt.state in {"serving", "failed"} or (attempt.state == "refused" and self._proven)
        self._proven = self._proven and not attempt.unproven
        if attempt.state != "refused":
            self._fast.lost()
        self._owes_resume = attempt.paused
        self._retry_after(attempt)
        self.explain(_why(attempt))
        if was_clean and not self._clean and self._on_dead is not None:
            self._on_dead(self.health)
        return attempt

    def enter(self, state: State) -> None:
        if state == "probation":
            self._become(state=state, ready=False, version="", reason="its canary is being replayed")
        else:
            self._become(state=state)

    def explain(self, reason: str) -> None:
        """Why it is not ready, or why the newest version is not the one served; until the next change."""
        self._reason = reason
        self.show()

    def show(self, *, reason: str | None = None, reachable: bool = True) -> None:
        """Storage that is away leaves a serving engine ready; an engine that does not answer is not."""
        ready = self._proven and not self._owes_resume and reachable
        state: State = "dirty" if not self._clean else "paused" if self._owes_resume else "idle"
        label = self._label if self._proven else ""
        why = (self._reason if reason is None else reason) or self._fast.behind(self.current_id)
        self._become(ready=ready, version=label, state="serving" if ready else state, reason=why)

    def release(self, version: StagedVersion) -> None:
        """A staged version was not loaded after all."""
        if self.current is None or version.folder != self.current.folder:
            self._let_go(version)

    # -- inside ------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return self.current_id.label if self.current_id is not None else ""

    def _changed_by_others(self, status: EngineStatus) -> None:
        if self._fast.brought(status):
            log.info("%s: %s came by a fast path", self.engine.name, status.label, extra={"event": "fast-path"})
            self._proven = self._clean = True
            self.explain("")
        elif self._proven:
            self._taken_over(status.label)

    def _begin(self, status: EngineStatus) -> None:
        # Found paused: a watcher before us may have left it so, in the middle of a load; or a trainer is sending.
        clean = not status.paused or self._fast.may_be_sending()
        self._boot_id, self._clean, self._owes_resume = status.boot_id, clean, False
        self._found, self._tried = status.label, False
        self._takeovers, self._contested = 0, ""

    def _taken_over(self, label: str) -> None:
        self._doubt(f"somebody else changed the engine to {label or 'no version'!r}")
        # Not by the time that a fight takes: a large model is loaded for minutes, and a poll may be slow. No label:
        # restarted, where the boot id cannot tell (vLLM with several API servers).
        self._takeovers = (0 if self._peace > PEACE_SECONDS else self._takeovers) + bool(label)
        if self._takeovers >= TAKEOVERS:
            self._contested = (
                f"{self.engine.name} was changed by somebody else {TAKEOVERS} times, each time soon after it was "
                f"loaded here, last to {label!r}, which is not ours. Does a second watcher follow it, of this or "
                "another channel? Nothing more is loaded; stop one of them, then restart the engine or this watcher"
            )
            log.critical("%s", self._contested, extra={"event": "contested"})

    def _doubt(self, reason: str) -> None:
        if self.current_id is not None or self._proven:
            log.warning("%s: %s", self.engine.name, reason, extra={"event": "doubt"})
            self._fast.lost()
            self._proven, self._retry_at = False, 0.0
            self.explain(reason)

    def _pay_resume(self) -> None:
        if self._owes_resume:
            self.engine.resume()
            self._owes_resume = False
            self.explain("")

    def _good_after(self, version: StagedVersion, ground: Ground, attempt: Attempt) -> StagedVersion | None:
        if attempt.state == "serving":
            return version
        if attempt.state == "refused":
            return self.current
        return ground.last_good or self.current

    def _keep_only(self, good: StagedVersion | None, *others: StagedVersion | None) -> None:
        for unused in (self.current, *others):
            if unused is not None and (good is None or unused.folder != good.folder):
                self._let_go(unused)
        self.current = good

    def _retry_after(self, attempt: Attempt) -> None:
        if self._clean:
            self._retry.reset()
        else:
            self.postpone()
            log.critical(
                "%s %s: %s", self.engine.name, attempt.left, attempt.error, extra={"event": "dirty", **IN_RECEIPT}
            )

    def _become(self, **changes: Any) -> None:
        health = replace(self.health, **changes)
        if health == self.health:
            return
        self.health = replace(health, since=time.time()) if health.state != self.health.state else health
        if self._on_change is not None:
            self._on_change(self.health)


def _why(attempt: Attempt) -> str:
    if attempt.error is None:
        return ""
    return f"it {attempt.left}: {attempt.error}" if attempt.state == "dirty" else str(attempt.error)
