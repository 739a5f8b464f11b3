"""What a watcher says of its engine: to a probe (Health), and for good (Receipt)."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckptsync import logs
from ckptsync.errors import CkptSyncError
from ckptsync.version import parse_label

IN_RECEIPT = {"in_receipt": True}
"""`extra` of log lines that a receipt, or `on_dead`, says too: whoever prints both can leave them out."""

State = Literal[
    "idle", "staging", "staged", "paused", "loading", "confirmed", "recorded", "probation", "serving", "dirty"
]
"""The watcher's state machine, in order. `probation`: it computes again, and its canary is being replayed. `dirty`:
left paused, old and new weights may be mixed; to be replaced."""

Outcome = Literal["serving", "refused", "failed", "dirty"]
"""How an attempt ended. `refused`: the engine was not touched, the old version serves on. `failed`: it was
touched and brought back to the last good version. `dirty`: that failed too, and nothing serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A probe's answer. Not ready before the first confirmed load, nor once a change has ended in doubt.

    During a change that goes well it stays ready, on purpose. Until the pause the old version is whole; from then
    on requests wait in the engine, and are computed by a whole version, the new one or the old one again. To take
    a fleet out of rotation at every version would move its load to the others, which change at the same moment.
    At proof level 4 it is not ready while the canary is replayed: what it computes then is not proven yet.
    """

    ready: bool = False
    version: str = ""
    """Label of the version that the engine was proven to hold; empty before the first load."""

    state: State = "idle"
    reason: str = "no version has been loaded yet"
    """Why it is not ready, or why the newest version is not the one served. Empty when all is well."""

    since: float = field(default_factory=time.time)
    """When `state` was entered, in seconds since 1970."""

    follow: str = ""
    """What the watcher is bound for: `latest`, `every`, or the one version that it stays on."""

    newest: str = ""
    """Label of the newest complete version, as of the last look at the store."""

    lag: int = 0
    """How many live versions are newer than the one that is served; all of them if none is."""


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
    created: float = 0.0
    """When `version` was published, in seconds since 1970 by the trainer's clock."""

    stage_seconds: float = 0.0
    pause_seconds: float = 0.0
    load_seconds: float = 0.0
    bytes: int = 0
    fingerprint: str = ""
    proof: int = 0
    """The level of proof that was demanded."""

    warnings: tuple[str, ...] = ()
    error: dict[str, str] | None = None
    """`kind` and `message` of what went wrong."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `Channel.write_receipt`."""
        return {**asdict(self), "warnings": list(self.warnings)}

    def for_log(self) -> dict[str, Any]:
        """The attempt as `extra` of a log line."""
        seconds = {name: getattr(self, name) for name in ("stage_seconds", "pause_seconds", "load_seconds")}
        kind = {"kind": self.error["kind"]} if self.error is not None else {}
        version = parse_label(self.version)
        about = logs.about(version) if version is not None else {}
        return {
            **about,
            "event": f"attempt-{self.state}",
            "bytes": self.bytes,
            **seconds,
            **kind,
            **IN_RECEIPT,
        }


def describe(error: CkptSyncError) -> dict[str, str]:
    """An error as a receipt carries it."""
    return {"kind": error.kind, "message": str(error)}
