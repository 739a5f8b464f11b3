"""An engine that lives in a Ray actor: its adapter is in the actor, and speaks to a watcher by remote calls.

    @ray.remote(num_gpus=1, concurrency_groups=GROUPS)
    class Rollout(EngineActor):
        def __init__(self) -> None:
            self.engine = LlmEngine(vllm.LLM(model, weight_transfer_config={"backend": "ckptsync"}))

    watcher = Watcher(root, RayEngine(handle, name="rollout-0"), stage=...)

Weights do not go through Ray. From files: the actor reads the stage itself, so that watcher and actor are on one node
and see one stage. By a fast transport (`reach`): `WeightSync([VllmNccl(), Checkpoint()], engines=[RayEngine(...)])`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from ckptsync.engine import Confirmation, Engine, EngineStatus, ReadBack, StagedVersion, Versioned
from ckptsync.engine_http import EngineHttp, HttpOptions
from ckptsync.errors import CkptSyncError, EngineDirty, EngineError, EngineRefused, EngineUnavailable, InvalidInput
from ckptsync.manifest import TensorSpec
from watchers.live.announced import announced

from .calls import get
from .meeting import node_address
from .reach import Asked, Reach, Wire

GROUPS = {"ckptsync": 4}
"""For `@ray.remote(concurrency_groups=GROUPS)`: threads for a watcher's calls, beside those that compute. Without, a
call that computes behind a pause would wait for the resume, and the resume for the call."""

PAUSE_SECONDS = 600.0
"""For computations under way to end."""

LOAD_RATE = 50e6
"""Bytes per second that a load does at least."""

_REACHING = threading.Lock()

_WITHOUT = {"read_back": "none", "prepare": None}
"""What an adapter that has no such method would say."""


class _Announced(NamedTuple):
    """A version as it is sent. Not the manifest: that of a large MoE weighs tens of megabytes, and five steps ask."""

    folder: str
    manifest_digest: str


class EngineActor:
    """Mixin of an actor class, sync or async; `self.engine` is the adapter to the engine in this process.

    Whoever computes with the engine holds its gate, where the adapter has one (ModuleEngine, LlmEngine).
    """

    engine: Engine
    _announced: StagedVersion | None = None
    _reach: Reach | None = None

    @ray.method(concurrency_group="ckptsync")
    def ckptsync_step(self, step: str, *args: Any) -> Any:
        """For RayEngine: one step of the Engine protocol."""
        method = getattr(self._reached().by_steps, step, None)
        if method is None and step in _WITHOUT:
            return _WITHOUT[step]
        if method is None:
            raise EngineRefused(f"{self.engine.name}: its adapter {type(self.engine).__name__} has no {step}")
        return method(*[self._read(arg) if isinstance(arg, _Announced) else arg for arg in args])

    @ray.method(concurrency_group="ckptsync")
    def ckptsync_request(self, asked: Asked) -> tuple[int, bytes]:
        """For RayEngine: a request of a fast transport."""
        return self._reached().answer(asked)

    @ray.method(concurrency_group="ckptsync")
    def ckptsync_address(self) -> str:
        """For RayEngine: where the actor's node is found by others."""
        return node_address()

    def _reached(self) -> Reach:
        with _REACHING:
            if self._reach is None or self._reach.engine is not self.engine:
                self._reach = Reach(self.engine)
            return self._reach

    def _read(self, sent: _Announced) -> StagedVersion:
        known = self._announced
        if known is None or (known.folder, known.manifest.manifest_digest) != sent:
            known = self._announced = announced(*sent)
        return known


class RayEngine(Versioned):
    """The Engine protocol by calls to an EngineActor; InvalidInput for another actor. May be sent to another process.

    A call that is not answered within `timeout` seconds (a pause, or a load of many bytes, has longer) raises
    EngineUnavailable, or EngineDirty once weights may have been touched; so does an actor that dies. Restarted by Ray,
    the actor has another boot id, and is loaded again.
    """

    def __init__(self, actor: ActorHandle[Any], *, name: str, timeout: float = 60.0) -> None:
        if not hasattr(actor, "ckptsync_step"):
            raise InvalidInput(f"{name}: the class of its actor is not an EngineActor")
        self.actor: Any = actor
        self.timeout, self._name = timeout, name

    @property
    def name(self) -> str:
        return self._name

    @property
    def wire(self) -> Wire:
        """httpx's way to the actor."""
        return Wire(self.actor)

    @property
    def url(self) -> str:
        """Names the actor's node, which a restart may change: groups meet on the way there, and handles of memory stay
        on one node. Nothing listens there. EngineUnavailable if the actor does not say."""
        address = self._call(self.actor.ckptsync_address.remote(), "address", self.timeout, EngineUnavailable)
        return f"http://[{address}]" if ":" in address else f"http://{address}"

    @property
    def http(self) -> EngineHttp:
        """For the transports that speak to servers."""
        return EngineHttp(self.url, HttpOptions(timeout=self.timeout, min_load_rate=LOAD_RATE), transport=self.wire)

    def status(self) -> EngineStatus:
        return self._ask("status")  # type: ignore[no-any-return]

    def schema(self) -> Mapping[str, TensorSpec] | None:
        return self._ask("schema")  # type: ignore[no-any-return]

    def pause(self) -> None:
        self._ask("pause", seconds=self.timeout + PAUSE_SECONDS)

    def prepare(self, version: StagedVersion) -> object:
        """What the adapter can do for a version before the pause, if anything."""
        return self._of(version, "prepare")

    def start(self, version: StagedVersion) -> None:
        self._of(version, "start")

    def update(self, version: StagedVersion) -> None:
        self._of(version, "update", EngineDirty)

    def finish(self, version: StagedVersion) -> None:
        self._of(version, "finish", EngineDirty)

    def confirm(self, version: StagedVersion) -> Confirmation:
        return self._of(version, "confirm", EngineDirty)  # type: ignore[no-any-return]

    def resume(self) -> None:
        self._ask("resume")

    def read_back(self) -> ReadBack:
        return self._ask("read_back")  # type: ignore[no-any-return]

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        """EngineRefused where the adapter cannot."""
        return self._ask("score", list(token_ids), first, seconds=self.timeout + PAUSE_SECONDS)  # type: ignore[no-any-return]

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        """EngineRefused where the adapter cannot."""
        return self._ask("generate", list(token_ids), count, seconds=self.timeout + PAUSE_SECONDS)  # type: ignore[no-any-return]

    def close(self) -> None:
        """The actor is its owner's."""

    def _of(self, version: StagedVersion, step: str, gone: type[EngineError] = EngineUnavailable) -> Any:
        sent = _Announced(version.folder, version.manifest.manifest_digest)
        return self._ask(step, sent, seconds=self.timeout + version.manifest.nbytes / LOAD_RATE, gone=gone)

    def _ask(
        self, step: str, *args: Any, seconds: float | None = None, gone: type[EngineError] = EngineUnavailable
    ) -> Any:
        return self._call(self.actor.ckptsync_step.remote(step, *args), step, seconds or self.timeout, gone)

    def _call(self, ref: ObjectRef[Any], step: str, seconds: float, gone: type[EngineError]) -> Any:
        """`gone`: what no answer means."""
        try:
            return get(ref, seconds)
        except CkptSyncError:
            raise
        except GetTimeoutError as error:
            ray.cancel(ref)
            raise gone(f"{step}: {self.name} did not answer within {seconds:g} s") from error
        except RayError as error:
            raise gone(f"{step}: {self.name}: {_short(error)}") from error
        except Exception as error:
            wrong = EngineRefused if gone is EngineUnavailable else EngineDirty
            raise wrong(f"{step}: {self.name}: {type(error).__name__}: {error}") from error


def _short(error: RayError) -> str:
    """Ray's first line: the others advise on its own tools."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
