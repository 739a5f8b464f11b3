"""The contract that both sides speak: what an inference engine can be asked to do with a version.

An adapter is a small class with these methods; `watchers/engines/` has one each for vLLM, SGLang and plain torch
modules. The caller (the watcher, or a transport) keeps the order

    status, schema        any time, harmless
    pause                 requests stop being computed; retryable, harmless
    start, update, finish the weights change; a failure from `start` on leaves the engine *dirty*
    confirm               read back: the engine itself says what it holds
    resume                only after `confirm`, or when nothing was touched

and decides what a failure means: before `start` the engine still holds the old version and is resumed; from
`start` on only a complete, confirmed load makes it clean again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .manifest import Manifest, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion:
    """A complete, verified version on this host."""

    manifest: Manifest
    folder: str
    """Absolute path; holds exactly the manifest's files (and `ckptsync.json`). Not changed while in use."""

    @property
    def label(self) -> str:
        return self.manifest.id.label


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What the engine says of itself now."""

    label: str
    """The version label it serves, as it reports it; `""` when it cannot say or is on its base weights."""

    boot_id: str
    """Differs after a restart of the engine process; a restarted engine has lost what was loaded."""

    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The engine's answer after a load."""

    label: str
    fingerprint: str = ""
    """A digest over the weights that the engine computed itself; equal for equal weights on equal engines. Empty
    where the engine offers none."""

    warnings: tuple[str, ...] = ()
    """What the engine could not do and does not matter for the weights, e.g. a cache reset it does not support."""


class Engine(Protocol):
    """An adapter to one engine. Every method raises EngineUnavailable, EngineRefused, EngineDirty or ProofFailed."""

    @property
    def name(self) -> str:
        """For receipts and logs, e.g. `vllm@http://127.0.0.1:8000`."""
        ...

    def status(self) -> EngineStatus:
        """EngineUnavailable if it does not answer."""
        ...

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Checkpoint names that the engine needs, as it was started; None where it cannot be known."""
        ...

    def pause(self) -> None:
        """Stop computing. Idempotent."""
        ...

    def start(self, version: StagedVersion) -> None:
        """Get ready to change weights. From here on a failure leaves the engine dirty."""
        ...

    def update(self, version: StagedVersion) -> None:
        """Load the weights from `version.folder`."""
        ...

    def finish(self, version: StagedVersion) -> None:
        """Drop caches that belong to the old weights, then set the label `version.label`."""
        ...

    def confirm(self, version: StagedVersion) -> Confirmation:
        """Read back the label and, where there is one, the fingerprint. ProofFailed on any other label."""
        ...

    def resume(self) -> None:
        """Compute again. Idempotent."""
        ...

    def close(self) -> None: ...
