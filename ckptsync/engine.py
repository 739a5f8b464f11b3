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

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from .manifest import Manifest, TensorSpec
from .version import VersionId, label_version


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

    @property
    def version(self) -> VersionId | None:
        """The label as an identity; None where it is none: an engine's default, a model's path, a person's text."""
        return label_version(self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The engine's answer after a load."""

    label: str
    fingerprint: str = ""
    """A digest over the weights that the engine computed itself; equal for equal weights on equal engines. Empty
    where the engine offers none."""

    read_back: bool = False
    """The engine's live values were compared with the version's, all of them."""

    warnings: tuple[str, ...] = ()
    """What the engine could not do and does not matter for the weights, e.g. a cache reset it does not support."""


class Versioned(ABC):
    """What every adapter says of its version in the same words."""

    @abstractmethod
    def status(self) -> EngineStatus:
        """EngineUnavailable if it does not answer."""

    def version(self) -> VersionId | None:
        """The version that the engine itself reports, whichever way it came: after a sync the sync's.

        None where it reports none, such as on its base weights or while it may hold a mix; never a value of the
        adapter's own. EngineUnavailable if it does not answer.
        """
        return self.status().version


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


ReadBack = Literal["values", "checksum", "none"]
"""How an engine can show what it holds: its live values compared with the version's; a checksum of its own; not."""


@runtime_checkable
class ReadsBack(Protocol):
    """An engine that can say, before it is paused, how it will show what it holds. Others cannot be asked for it."""

    def read_back(self) -> ReadBack:
        """Harmless, and answered while it serves."""
        ...


@runtime_checkable
class Scores(Protocol):
    """An engine that can replay a canary. It must not be paused: a paused engine computes nothing."""

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        """Natural log-probabilities, at temperature 1, of `token_ids[first:]`, each given all tokens before it.

        Computed afresh: nothing of a prefix cache is used. `first` is at least 1.
        """
        ...


@runtime_checkable
class Generates(Protocol):
    """An engine that can answer a prompt, for `ckptsync selfcheck`."""

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, greedily, end tokens or not."""
        ...
