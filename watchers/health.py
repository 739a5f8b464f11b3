"""What a watcher says of its engine: to a probe (Health), and for good (Receipt)."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckptsync.errors import CkptSyncError

State = Literal["idle", "staging", "staged", "paused", "loading", "confirmed", "recorded", "serving", "dirty"]
"""The watcher's state machine, in order. `dirty`: left paused, old and new weights may be mixed; to be
replaced."""

Outcome = Literal["serving", "refused", "failed", "dirty"]
"""How an attempt ended. `refused`: the engine was not touched, the old version serves on. `failed`: it was
touched and brought back to the last good version. `dirty`: that failed too, and nothing serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A probe's answer. Not ready before the first confirmed load, nor once a change has ended in doubt.

    During a change that goes well it stays ready, on purpose. Until the pause the old version is whole; from then
    on requests wait in the engine, and are computed by a whole version, the new one or the old one again. To take
    a fleet out of rotation at every version would move its load to the others, which change at the same moment.
    """

    ready: bool = False
    version: str = ""
    """Label of the version that the engine was proven to hold; empty before the first load."""

    state: State = "idle"
    reason: str = "no version has been loaded yet"
    """Why it is not ready, or why the newest version is not the one served. Empty when all is well."""

    since: float = field(default_factory=time.time)
    """When `state` was entered, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """An engine's signed-off statement about one attempt to load a version. Durations in seconds."""

    version: str
    """Label of the version that was to be loaded."""

    state: Outcome
    label: str
    """Label that the engine serves now; empty if nothing proven does."""

    since: float
    """When this became so, in seconds since 1970."""

    engine: str
    stage_seconds: float = 0.0
    pause_seconds: float = 0.0
    load_seconds: float = 0.0
    bytes: int = 0
    fingerprint: str = ""
    warnings: tuple[str, ...] = ()
    error: dict[str, str] | None = None
    """`kind` and `message` of what went wrong."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `Channel.write_receipt`."""
        return {**asdict(self), "warnings": list(self.warnings)}


def describe(error: CkptSyncError) -> dict[str, str]:
    """An error as a receipt carries it."""
    return {"kind": error.kind, "message": str(error)}
