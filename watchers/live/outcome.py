"""How an update ended on one rank. Apart from `model`, so that who only reads it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptsync.errors import CkptSyncError

Path = Literal["plan", "reload"]
Proof = Literal["elements", "sums", "none"]
State = Literal["loaded", "refused", "restored", "dirty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an update ended on this rank."""

    state: State
    path: Path | None = None
    """What loaded the version that the model holds now: the copy plan, or the engine's own reload."""

    why: str = ""
    """Why it was not the plan; or why the plan had to copy everything after it had put what changed."""

    moved: int | None = None
    """Bytes that were moved where only what changed was put into the model; None where all of it was."""

    proof: Proof = "none"
    """How the live values were compared with the staged ones: element by element, by sums on the device, or not,
    since without a plan they cannot be read back."""

    seconds: float = 0.0
    proof_seconds: float = 0.0
    error: CkptSyncError | None = None
