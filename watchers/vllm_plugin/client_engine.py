"""The engine contract over vLLM's own EngineClient, for a watcher inside the API server: no HTTP, no dev mode."""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from ckptsync.engine import Confirmation, EngineStatus, StagedVersion
from ckptsync.errors import EngineDirty, EngineError, EngineRefused, EngineUnavailable, ProofFailed
from ckptsync.manifest import TensorSpec
from watchers.engines._schema import folder_schema

from .receipts import await_ready, await_receipts, judge, notes, receipt_folder

log = logging.getLogger(__name__)

T = TypeVar("T")

SLEEP_STATE = "vllm:engine_sleep_state"
BASE_LABEL = "default"
CALL_SECONDS = 60.0
LOAD_RATE = 100e6
"""Bytes per second that a load does at least."""


class ClientEngine:
    """One engine, driven from the watcher's thread on the server's event loop."""

    def __init__(
        self, client: Any, loop: asyncio.AbstractEventLoop, *, pause_mode: str = "keep", cache: str = "flush"
    ) -> None:
        self.client, self.loop, self.pause_mode, self.cache = client, loop, pause_mode, cache
        self._boot_id = uuid.uuid4().hex  # the engine does not outlive its API server
        self._label = ""
        self._notes: tuple[str, ...] = ()
        parallel = client.vllm_config.parallel_config
        self._ranks: int = parallel.world_size_across_dp
        self._base_schema = folder_schema(client.vllm_config.model_config.model)

    @property
    def name(self) -> str:
        return "vllm"

    def status(self) -> EngineStatus:
        if getattr(self.client, "errored", False):
            raise EngineUnavailable("status: vLLM's engine core is dead")
        if asleep():
            # Awake again it counts as restarted: at level 2 it has lost its weights and kept its label.
            self._boot_id = uuid.uuid4().hex
            raise EngineUnavailable("status: the engine sleeps")
        label = self._reported_label()
        paused = bool(self._ask("status", self.client.is_paused()))
        return EngineStatus(label="" if label == BASE_LABEL else label, boot_id=self._boot_id, paused=paused)

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
            self._finish(None)
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
        log.info("%s: %s", version.label, "; ".join(self._notes))

    def finish(self, version: StagedVersion) -> None:
        if self.cache == "flush":
            if self._ask("flush", self.client.reset_prefix_cache(True), kind=EngineDirty) is False:
                raise EngineDirty("flush: vLLM could not drop what was computed with the old weights")
            self._ask("flush", self.client.reset_mm_cache(), kind=EngineDirty)
            self._ask("flush", self.client.reset_encoder_cache(), kind=EngineDirty)
        self._finish(version.label)

    def confirm(self, version: StagedVersion) -> Confirmation:
        label = self._reported_label()
        if label != version.label:
            raise ProofFailed(f"confirm: the engine reports {label!r} after a load of {version.label!r}")
        return Confirmation(label=label, warnings=self._notes)

    def resume(self) -> None:
        self._ask("resume", self.client.resume_generation())
        if self._ask("resume", self.client.is_paused()):
            raise EngineRefused("resume: the engine is still paused")

    def close(self) -> None:
        """The server owns the client."""

    def _finish(self, label: str | None) -> None:
        finish: Callable[..., Coroutine[Any, Any, None]] = self.client.finish_weight_update
        knows_labels = bool(inspect.signature(finish).parameters)  # since 0.27; before, this adapter remembers
        work = finish(label) if label is not None and knows_labels else finish()
        self._ask("label", work, kind=EngineDirty)
        self._label = label or self._label

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
    from prometheus_client import REGISTRY

    metrics = (metric for metric in REGISTRY.collect() if metric.name == SLEEP_STATE)
    samples = (sample for metric in metrics for sample in metric.samples)
    return any(sample.labels.get("sleep_state") == "awake" and sample.value == 0 for sample in samples)


def _load_seconds(version: StagedVersion) -> float:
    return CALL_SECONDS + version.manifest.nbytes / LOAD_RATE
