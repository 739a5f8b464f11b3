"""Engines for fault injection only: one that behaves, and ones that lie, half-apply, hang and die.

What they hold is really read from the staged folder, file by file, so that a test compares bytes and not
labels. The behaviour of working engines is tested on real ones.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from ..engine import Confirmation, Engine, EngineStatus, ReadBack, StagedVersion
from ..errors import EngineDirty, EngineRefused, EngineUnavailable, ProofFailed
from ..manifest import TensorSpec

_boots = itertools.count(1)


class FakeEngine:
    """Does as the contract says. `calls` is what was asked of it, `served` every (weights, label) it computed
    with."""

    called = "fake"
    """Its name."""

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
        return self.called

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

    def fail(
        self, step: str, error: type[Exception] = EngineDirty, *, times: int = 1, only: str = "", says: str = ""
    ) -> None:
        self._failures[step] = [error, times, only, says or f"injected at {step}"]

    def _maybe(self, step: str, version: StagedVersion | None = None) -> None:
        failure = self._failures.get(step)
        if failure and failure[1] > 0 and (not failure[2] or (version and version.label == failure[2])):
            failure[1] -= 1
            self.calls.append(f"{step} fails")
            raise failure[0](failure[3])

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


class Faults:
    """Failures for an engine of yours: `around` it, `fail` makes one of its steps raise, before the engine hears of it
    or after it has done what it was asked for (a lost answer)."""

    STEPS = ("status", "schema", "pause", "start", "update", "finish", "confirm", "resume")

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        """Step -> how often it is still to fail."""

        self._errors: dict[str, tuple[type[Exception], bool]] = {}

    def fail(self, step: str, error: type[Exception] = EngineDirty, *, times: int = 1, after: bool = False) -> None:
        self.left[step], self._errors[step] = times, (error, after)

    def around(self, engine: Engine) -> Engine:
        """The engine, with whatever else it offers (`read_back`, `score`)."""
        return cast("Engine", _Faulty(engine, self))

    def call(self, step: str, method: Callable[..., Any], *args: Any) -> Any:
        if self.left.get(step, 0) <= 0:
            return method(*args)
        self.left[step] -= 1
        error, after = self._errors[step]
        if after:
            method(*args)
        raise error(f"injected at {step}")


class _Faulty:
    def __init__(self, engine: Engine, faults: Faults) -> None:
        self._engine, self._faults = engine, faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return partial(self._faults.call, name, found) if name in Faults.STEPS else found


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

    def confirm(self, version: StagedVersion) -> Confirmation:  # noqa: ARG002
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


class Checksummed(FakeEngine):
    """Offers a checksum of its own, of whatever it holds. Keeps one tensor old while it loads `stale`."""

    stale = ""
    how: ReadBack = "checksum"

    def read_back(self) -> ReadBack:
        return self.how

    def update(self, version: StagedVersion) -> None:
        super().update(version)
        if version.label == self.stale:
            self.weights = "all new but one"


class Computing(Failing):
    """Reads back what it holds, and gives log-probabilities: `says` for each version's label, -0.5 without one."""

    def __init__(self, schema: Mapping[str, TensorSpec] | None = None) -> None:
        super().__init__(schema)
        self.says: dict[str, float] = {}

    def read_back(self) -> ReadBack:
        return "values"

    def confirm(self, version: StagedVersion) -> Confirmation:
        return replace(super().confirm(version), read_back=True)

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        self._maybe("score")
        self.calls.append(f"score {self.label}")
        if self.paused:
            raise EngineUnavailable("a paused engine computes nothing")
        return [self.says.get(self.label, -0.5)] * (len(token_ids) - first)
