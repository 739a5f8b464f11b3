"""One engine as its watcher knows it: what it was proven to hold, what a failed change left behind, its health.

An engine changes under a watcher's eyes: it is restarted, somebody else loads it, it misses a resume. Whatever
that is, it is ready only while it was proven to hold a version and has been told to compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptsync.engine import Engine, EngineStatus, StagedVersion
from ckptsync.version import VersionId

from .discover import Backoff
from .health import Health, State
from .load import Attempt, Ground, Switch
from .proof import Fingerprints

log = logging.getLogger(__name__)

Listener = Callable[[Health], None]


class Serving:
    """The engine between changes. `let_go` is told of each staged version that is not needed any more."""

    def __init__(
        self,
        engine: Engine,
        *,
        let_go: Callable[[StagedVersion], None],
        retry: Backoff,
        on_change: Listener | None = None,
        on_dead: Listener | None = None,
    ) -> None:
        self.engine, self.health = engine, Health()
        self.current: StagedVersion | None = None
        """The last good version: what the engine was proven to hold, kept in the stage to go back to."""
        self._let_go, self._retry, self._retry_at = let_go, retry, 0.0
        self._on_change, self._on_dead = on_change, on_dead
        self._proof = Fingerprints()
        self._switch = Switch(engine, self._proof, self.enter)
        self._boot_id = ""
        self._proven = False
        """The engine holds `current` now."""
        self._clean = True
        """The engine's weights are whole, whichever they are."""
        self._owes_resume = False
        self._reason = self.health.reason

    @property
    def current_id(self) -> VersionId | None:
        return self.current.manifest.id if self.current is not None else None

    def look(self) -> tuple[EngineStatus, bool]:
        """Its status, and whether it was restarted since the last look; an owed resume is made up for.

        A restarted engine has lost what was loaded, and is not ready before it holds the current version
        again.
        """
        status = self.engine.status()
        if not self._boot_id:
            self._begin(status)
        restarted = status.boot_id != self._boot_id
        if restarted:
            self._begin(status)
            self._proof.forget()
            self._doubt(f"the engine was restarted and reports {status.label or 'no version'!r}")
        elif self._proven and self.current is not None and status.label != self.current.label:
            self._doubt(f"somebody else changed the engine to {status.label or 'no version'!r}")
        self._pay_resume()
        return status, restarted

    def lost(self) -> StagedVersion | None:
        """The version that the engine should hold and does not, if it is time to load it again."""
        due = self.current is not None and not self._proven and time.monotonic() >= self._retry_at
        return self.current if due else None

    def change(self, version: StagedVersion, status: EngineStatus, last_good: StagedVersion | None) -> Attempt:
        """Load `version`, going back to `last_good` if that fails, and keep what the engine holds then.

        Raises nothing: an interrupt is in the attempt, for the caller to raise again.
        """
        ground = Ground(status=status, last_good=last_good, clean=self._clean)
        self._boot_id, was_clean = status.boot_id, self._clean
        attempt = self._switch.to(version, ground)
        self._keep_only(self._good_after(version, ground, attempt), version, last_good)
        self._clean = attempt.state != "dirty"
        self._proven = attempt.state in {"serving", "failed"} or (attempt.state == "refused" and self._proven)
        self._owes_resume = attempt.paused
        self._retry_after(attempt)
        self.explain(str(attempt.error) if attempt.error is not None else "")
        if was_clean and not self._clean and self._on_dead is not None:
            self._on_dead(self.health)
        return attempt

    def enter(self, state: State) -> None:
        self._become(state=state)

    def explain(self, reason: str) -> None:
        """Why it is not ready, or why the newest version is not the one served; until the next change."""
        self._reason = reason
        self.show()

    def show(self, *, reason: str | None = None, reachable: bool = True) -> None:
        """Storage that is away leaves a serving engine ready; an engine that does not answer is not."""
        ready = self._proven and not self._owes_resume and reachable
        state: State = "dirty" if not self._clean else "paused" if self._owes_resume else "idle"
        label = self.current.label if self.current is not None and self._proven else ""
        why = self._reason if reason is None else reason
        self._become(ready=ready, version=label, state="serving" if ready else state, reason=why)

    def release(self, version: StagedVersion) -> None:
        """A staged version was not loaded after all."""
        if self.current is None or version.folder != self.current.folder:
            self._let_go(version)

    # -- inside ------------------------------------------------------------------------------------------

    def _begin(self, status: EngineStatus) -> None:
        # Found paused: a watcher before us may have left it so, in the middle of a load.
        self._boot_id, self._clean, self._owes_resume = status.boot_id, not status.paused, False

    def _doubt(self, reason: str) -> None:
        if self.current is not None:
            log.warning("%s: %s", self.engine.name, reason)
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
            self._retry_at = time.monotonic() + self._retry.failed()
            log.critical("%s is left paused, its weights may be mixed: %s", self.engine.name, attempt.error)

    def _become(self, **changes: Any) -> None:
        health = replace(self.health, **changes)
        if health == self.health:
            return
        self.health = replace(health, since=time.time()) if health.state != self.health.state else health
        if self._on_change is not None:
            self._on_change(self.health)
