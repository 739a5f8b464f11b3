"""Engines for fault injection only: one that behaves, and ones that lie, half-apply, hang and die.

What they hold is really read from the staged folder, file by file, so that a test compares bytes and not
labels. The behaviour of working engines is tested on real ones.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

from ckptsync.engine import Confirmation, EngineStatus, StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable, ProofFailed
from ckptsync.manifest import TensorSpec

_boots = itertools.count(1)


class FakeEngine:
    """Does as the contract says. `calls` is what was asked of it, `served` every (weights, label) it computed
    with."""

    def __init__(self, schema: Mapping[str, TensorSpec] | None = None) -> None:
        self._schema = schema
        self.calls: list[str] = []
        self.while_paused: Callable[[], None] = lambda: None
        self.restart()

    def restart(self) -> None:
        """A new process with the base weights."""
        self.boot_id, self.weights, self.label, self.paused = f"boot-{next(_boots)}", "base", "", False

    @property
    def name(self) -> str:
        return "fake"

    def status(self) -> EngineStatus:
        return EngineStatus(label=self.label, boot_id=self.boot_id, paused=self.paused)

    def schema(self) -> Mapping[str, TensorSpec] | None:
        return self._schema

    def pause(self) -> None:
        self.calls.append("pause")
        self.paused = True

    def start(self, version: StagedVersion) -> None:
        self.calls.append(f"start {version.label}")
        if not self.paused:
            raise EngineRefused("not paused")
        self.while_paused()

    def update(self, version: StagedVersion) -> None:
        self.calls.append(f"update {version.label}")
        self.weights = weights_in(version)
        self.while_paused()

    def finish(self, version: StagedVersion) -> None:
        self.calls.append(f"finish {version.label}")
        self.label = version.label

    def confirm(self, version: StagedVersion) -> Confirmation:
        self.calls.append(f"confirm {version.label}")
        self.while_paused()
        if self.label != version.label:
            raise ProofFailed(f"holds {self.label!r}, not {version.label}")
        return Confirmation(label=self.label, fingerprint=self.weights)

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def close(self) -> None: ...

    def holds(self, version: StagedVersion | str) -> bool:
        folder = version if isinstance(version, str) else version.folder
        return self.weights == weights_of(folder)


def weights_in(version: StagedVersion) -> str:
    return weights_of(version.folder)


def weights_of(folder: str) -> str:
    """A digest over the shards of a folder, as an engine would read them: all that are there, by name."""
    state = hashlib.sha256()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            with open(os.path.join(folder, name), "rb") as file:
                state.update(file.read())
    return state.hexdigest()


class Failing(FakeEngine):
    """Raises at one step: `fail("update", EngineDirty, times=1)`. A load that fails at `update` leaves a
    mix."""

    def __init__(self, schema: Mapping[str, TensorSpec] | None = None) -> None:
        super().__init__(schema)
        self._failures: dict[str, list[Any]] = {}

    def fail(self, step: str, error: type[Exception] = EngineDirty, *, times: int = 1, only: str = "") -> None:
        self._failures[step] = [error, times, only]

    def _maybe(self, step: str, version: StagedVersion | None = None) -> None:
        failure = self._failures.get(step)
        if failure and failure[1] > 0 and (not failure[2] or (version and version.label == failure[2])):
            failure[1] -= 1
            self.calls.append(f"{step} fails")
            raise failure[0](f"injected at {step}")

    def status(self) -> EngineStatus:
        self._maybe("status")
        return super().status()

    def pause(self) -> None:
        self._maybe("pause")
        super().pause()

    def start(self, version: StagedVersion) -> None:
        self._maybe("start", version)
        super().start(version)

    def update(self, version: StagedVersion) -> None:
        failure = self._failures.get("update")
        if failure and failure[0] is EngineDirty and failure[1] > 0:
            self.weights = "mixed"
        self._maybe("update", version)
        super().update(version)

    def finish(self, version: StagedVersion) -> None:
        self._maybe("finish", version)
        super().finish(version)

    def confirm(self, version: StagedVersion) -> Confirmation:
        self._maybe("confirm", version)
        return super().confirm(version)

    def resume(self) -> None:
        self._maybe("resume")
        super().resume()


class LyingRefusal(FakeEngine):
    """Says that it refused, with half of the new weights in."""

    def update(self, version: StagedVersion) -> None:
        if not self.calls.count(f"update {version.label}") and len(self.calls) > 6:
            self.calls.append(f"update {version.label}")
            self.weights = "mixed"
            raise EngineRefused("nothing happened, honestly")
        super().update(version)


class OtherWeights(FakeEngine):
    """After the first load of a version, reports its label with other weights in."""

    def update(self, version: StagedVersion) -> None:
        again = f"update {version.label}" in self.calls
        super().update(version)
        if again:
            self.weights = "other"


class KeepsLabel(FakeEngine):
    """Answers OK to everything and never takes a label."""

    def finish(self, version: StagedVersion) -> None:
        self.calls.append(f"finish {version.label}")

    def confirm(self, version: StagedVersion) -> Confirmation:
        return Confirmation(label=self.label)


class Dies(FakeEngine):
    """The process is gone once a load of `only` begins; a supervisor starts it again with `restart`."""

    def __init__(self, schema: Mapping[str, TensorSpec] | None = None, *, only: str, deaths: int) -> None:
        self.dead, self.only, self.deaths = False, only, deaths
        super().__init__(schema)

    def restart(self) -> None:
        self.dead = False
        super().restart()

    def _alive(self) -> None:
        if self.dead:
            raise EngineUnavailable("connection refused")

    def status(self) -> EngineStatus:
        self._alive()
        return super().status()

    def update(self, version: StagedVersion) -> None:
        self._alive()
        if self.deaths > 0 and version.label == self.only:
            self.deaths -= 1
            self.dead = True
            self.calls.append(f"update {version.label}")
            raise EngineUnavailable("connection reset")
        super().update(version)

    def resume(self) -> None:
        self._alive()
        super().resume()
