"""The engine contract over vLLM's own EngineClient, for a watcher inside the API server: no HTTP, no dev mode."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from ckptsync import logs
from ckptsync.engine import Confirmation, EngineStatus, ReadBack, StagedVersion, Versioned
from ckptsync.errors import EngineDirty, EngineError, EngineRefused, EngineUnavailable, ProofFailed
from ckptsync.manifest import TensorSpec
from watchers.engines._application import Application
from watchers.engines._schema import folder_schema
from watchers.live.receipts import await_ready, await_receipts, judge, notes, receipt_folder

log = logs.get(__name__)

T = TypeVar("T")

SLEEP_STATE = "vllm:engine_sleep_state"
BASE_LABEL = "default"
CALL_SECONDS = 60.0
LOAD_RATE = 100e6
"""Bytes per second that a load does at least."""


class ClientEngine(Versioned):
    """One engine, driven from the watcher's thread on the server's event loop."""

    def __init__(
        self, client: Any, loop: asyncio.AbstractEventLoop, *, pause_mode: str = "keep", cache: str = "flush"
    ) -> None:
        self.client, self.loop, self.pause_mode, self.cache = client, loop, pause_mode, cache
        self._boot_id = uuid.uuid4().hex  # the engine does not outlive its API server
        self._label = ""
        self._notes: tuple[str, ...] = ()
        self._read_back = True
        self._ranks = _ranks_reached(client.vllm_config.parallel_config)
        self._base_schema = folder_schema(client.vllm_config.model_config.model)

    @property
    def name(self) -> str:
        return "vllm"

    def status(self) -> EngineStatus:
        if getattr(self.client, "errored", False):
            raise EngineUnavailable("status: vLLM's engine core is dead")
        if asleep():
            self._boot_id = uuid.uuid4().hex  # who is in this process may wake it up without a request
            raise EngineUnavailable("status: the engine sleeps")
        label = self._reported_label()
        paused = bool(self._ask("status", self.client.is_paused()))
        # Woken up it counts as restarted: at level 2 it has lost its weights and kept its label.
        boot_id = f"{self._boot_id}+{wake_ups()}"
        return EngineStatus(label="" if label == BASE_LABEL else label, boot_id=boot_id, paused=paused)

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """What is in the folder that the server was started with. None for a folder without weights: the workers
        check against the version that they started on."""
        return self._base_schema

    def pause(self) -> None:
        work = self.client.pause_generation(mode=self.pause_mode, clear_cache=self.cache == "flush")
        self._ask("pause", work)

    def prepare(self, version: StagedVersion) -> bool:
        """Before the pause; see `VllmTransferEngine.prepare`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with receipt_folder(version.folder) as folder:
            info = {
                "folder": version.folder,
                "manifest_digest": version.manifest.manifest_digest,
                "receipts": folder,
            }
            request = WeightTransferInitRequest(init_info=info)
            self._ask("prepare", self.client.init_weight_transfer_engine(request))
            return await_ready(folder, self._ranks, _load_seconds(version))

    def start(self, version: StagedVersion) -> None:  # noqa: ARG002 - the contract
        """Opens vLLM's session; the model is not touched. EngineRefused while it sleeps."""
        self._notes = ()
        if asleep():
            raise EngineRefused("start: the engine sleeps; its weights are loaded again after it wakes up")
        try:
            self._ask("start", self.client.start_weight_update())
        except EngineRefused:  # a session that nobody ended
            self._end_update()
            self._ask("start", self.client.start_weight_update())

    def update(self, version: StagedVersion) -> None:
        """EngineRefused if every rank holds what it held before, also by having gone back to it."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        seconds, failure = _load_seconds(version), None
        with receipt_folder(version.folder) as folder:
            info = {
                "folder": version.folder,
                "manifest_digest": version.manifest.manifest_digest,
                "label": version.label,
                "receipts": folder,
            }
            request = WeightTransferUpdateRequest(update_info=info)
            try:
                self._ask("load", self.client.update_weights(request), seconds, EngineDirty)
            except EngineError as error:
                failure = error
            known = await_receipts(folder, 1, 1.0)
            receipts = await_receipts(folder, self._ranks, seconds if known else 0.0)
        if failure is not None and not receipts:
            raise failure
        judge(receipts, self._ranks, version.manifest)
        if failure is not None:
            raise failure
        self._notes = notes(receipts)
        self._read_back = all(receipt.proof != "none" for receipt in receipts)
        more = logs.about(version.manifest.id, event="loaded-by-ranks")
        log.info("%s: %s", version.label, "; ".join(self._notes), extra=more)

    def finish(self, version: StagedVersion) -> None:
        """The session ends, then caches are dropped, then the label says so; the resume comes last."""
        self._end_update()
        if self.cache == "flush":
            if self._ask("flush", self.client.reset_prefix_cache(True), kind=EngineDirty) is False:
                raise EngineDirty("flush: vLLM could not drop what was computed with the old weights")
            self._ask("flush", self.client.reset_mm_cache(), kind=EngineDirty)
            self._ask("flush", self.client.reset_encoder_cache(), kind=EngineDirty)
        set_label = getattr(self.client, "update_weight_version", None)
        if set_label is not None:  # since 0.27; before, this adapter remembers
            self._ask("label", set_label(version.label), kind=EngineDirty)
        self._label = version.label

    def confirm(self, version: StagedVersion) -> Confirmation:
        label = self._reported_label()
        if label != version.label:
            raise ProofFailed(f"confirm: the engine reports {label!r} after a load of {version.label!r}")
        return Confirmation(label=label, read_back=self._read_back, warnings=self._notes)

    def read_back(self) -> ReadBack:
        """By the workers, until one of them says that it could not."""
        return "values" if self._read_back else "none"

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        """vLLM reads no prefix cache for log-probabilities of a prompt."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        rows = self._ask("score", self._last(token_ids, params)).prompt_logprobs
        return [float(rows[at][token_ids[at]].logprob) for at in range(first, len(token_ids))]

    async def _last(self, token_ids: Sequence[int], params: Any) -> Any:
        """The last output of a request."""
        request_id = f"ckptsync-{uuid.uuid4().hex}"
        async for output in self.client.generate({"prompt_token_ids": list(token_ids)}, params, request_id):
            last = output
        return last

    def resume(self) -> None:
        self._ask("resume", self.client.resume_generation())
        if self._ask("resume", self.client.is_paused()):
            raise EngineRefused("resume: the engine is still paused")

    def routes(self) -> Application:
        """vLLM's own routes over this client, for the fast transports; there is no port that others reach."""
        from .routes import own_routes

        return Application(own_routes(self.client), self.loop)

    def close(self) -> None:
        """The server owns the client."""

    def _end_update(self) -> None:
        self._ask("finish", self.client.finish_weight_update(), kind=EngineDirty)

    def _reported_label(self) -> str:
        read = getattr(self.client, "get_weight_version", None)
        return str(self._ask("label", read())) if read is not None else self._label

    def _ask(
        self,
        step: str,
        work: Awaitable[T],
        seconds: float = CALL_SECONDS,
        kind: type[EngineError] = EngineRefused,
    ) -> T:
        async def run() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()
            what = EngineUnavailable if kind is EngineRefused else kind
            raise what(f"{step}: vLLM did not answer within {seconds:.0f} s") from error
        except Exception as error:
            raise kind(f"{step}: {type(error).__name__}: {error}") from error


def asleep() -> bool:
    """From the server's own metrics: `is_sleeping` (0.32) also says yes to a mere pause."""
    return any(sample.value == 0 for sample in _samples(SLEEP_STATE) if sample.labels.get("sleep_state") == "awake")


def wake_ups() -> int:
    """How often the server was asked to wake up, also while nobody looked."""
    found = (sample for sample in _samples("http_requests") if sample.labels.get("handler") == "/wake_up")
    return sum(int(sample.value) for sample in found if sample.name == "http_requests_total")


def _samples(metric: str) -> list[Any]:
    from prometheus_client import REGISTRY

    return [sample for each in REGISTRY.collect() if each.name == metric for sample in each.samples]


def _ranks_reached(parallel: Any) -> int:
    """Workers that a call to this API server reaches: behind an outer load balancer, those of its own replicas."""
    if getattr(parallel, "local_engines_only", False):
        return int(parallel.world_size * parallel.data_parallel_size_local)
    return int(parallel.world_size_across_dp)


def _load_seconds(version: StagedVersion) -> float:
    return CALL_SECONDS + version.manifest.nbytes / LOAD_RATE
