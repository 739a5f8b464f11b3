"""vLLM over HTTP, stock: no plugin, the routes of `VLLM_SERVER_DEV_MODE=1`, vLLM >= 0.27.

Weights are loaded by `reload_weights` through `/collective_rpc`. Seen on vLLM 0.32:

- `reload_weights` answers 200 to a checkpoint without a layer and mixes; to a wrong path it answers 500,
  leaves parameters on the meta device, and the process dies at the next request while `/health` says 200.
  A complete load before that request repairs it. So what is loaded is verified before, and any failure of
  the load is EngineDirty.
- It resets neither the prefix cache nor the label: `finish` does both, caches first.
- The label lives in memory and is "default" after a restart. It outlives a sleep, which at level 2 the weights
  do not.
- The checksum route hashes parameters as the kernels hold them. The CPU build packs linear layers and
  leaves their parameters empty; such a checksum says nothing of them and is not passed on as a fingerprint.

Dev mode opens `/collective_rpc` to whoever reaches the port, and `--api-key` guards the inference routes only
(`/v1`, `/v2`, `/inference`): keep the port private.

To load some other way, override `start`, `update` and `end_update`; the rest is the same for every way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import httpx

from ckptsync.engine import Confirmation, EngineStatus, StagedVersion, Versioned
from ckptsync.engine_http import Call, EngineHttp, HttpOptions, Touch
from ckptsync.errors import EngineRefused, EngineUnavailable, InvalidInput, ProofFailed
from ckptsync.manifest import TensorSpec

from ._adapters import AdapterRoutes
from ._kind import told_apart
from ._probe import VllmProbe
from ._proof import ChecksumProof
from ._schema import SchemaMemory, refuse_adapter

PauseMode = Literal["keep", "wait", "abort"]
CachePolicy = Literal["flush", "keep"]

BASE_LABEL = "default"
BOOT_TIME = re.compile(r"^process_start_time_seconds (\S+)$", re.MULTILINE)
AWAKE = re.compile(r'^vllm:engine_sleep_state\{[^}]*sleep_state="awake"[^}]*\} (\S+)$', re.MULTILINE)
WAKE_UPS = re.compile(r'^http_requests_total\{handler="/wake_up"[^}]*\} (\S+)$', re.MULTILINE)
OF_NOTHING = hashlib.sha256(b"").hexdigest()
ADAPTERS = "It needs vLLM started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
DEV_MODE = "It needs vLLM >= 0.27 started with VLLM_SERVER_DEV_MODE=1."


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions(HttpOptions):
    """How to update one vLLM server."""

    pause_mode: PauseMode = "keep"
    """What becomes of running requests: `keep` freezes and resumes them, so that none is lost, and one
    answer may have tokens of two versions; `wait` lets them finish first; `abort` returns them as they
    are."""

    cache: CachePolicy = "flush"
    """`flush` drops prefix, multi-modal and encoder caches, and with them the KV of kept requests, which
    are then recomputed; `keep` leaves them: new tokens then follow from KV of the old weights."""

    fingerprint: bool = True
    """Ask for a checksum after each load (vLLM >= 0.32). It copies every parameter to the host and takes
    sha256 there, with the engine paused: about 1 s for each 1.5 GB of a rank."""

    def __post_init__(self) -> None:
        HttpOptions.__post_init__(self)
        if self.pause_mode not in get_args(PauseMode):
            raise InvalidInput(f"pause_mode must be one of {get_args(PauseMode)}, not {self.pause_mode!r}")
        if self.cache not in get_args(CachePolicy):
            raise InvalidInput(f"cache must be one of {get_args(CachePolicy)}, not {self.cache!r}")


class VllmEngine(ChecksumProof, AdapterRoutes, VllmProbe, Versioned):
    """One vLLM server, behind the engine contract."""

    options: VllmOptions

    def __init__(
        self, url: str, options: VllmOptions | None = None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        super().__init__()
        self.options = options or VllmOptions()
        self.http = EngineHttp(url, self.options, transport=transport)
        self._schema = SchemaMemory()
        self._warnings: list[str] = []

    @property
    def name(self) -> str:
        return f"vllm@{self.http.url}"

    def status(self) -> EngineStatus:
        """EngineUnavailable while it sleeps."""
        with told_apart("vllm", self.http.url, self.http.peek):
            metrics = self._metrics()
            if _asleep(metrics):
                raise EngineUnavailable(f"status: {self.name} sleeps")
            label = self._label("status")
        return EngineStatus(
            label="" if label == BASE_LABEL else label, boot_id=_boot_id(metrics), paused=self._paused("status")
        )

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Read from the folder that the server was started with, where that is a folder on this host."""
        roots = [model.get("root") for model in self._base_models("schema")]
        root = roots[0] if roots else None
        return self._schema.get(self._boot_id(), root if isinstance(root, str) else "")

    def pause(self) -> None:
        call = Call(
            step="pause",
            method="POST",
            path="/pause",
            params={"mode": self.options.pause_mode, "clear_cache": _flag(self.options.cache == "flush")},
            timeout=self.options.pause_timeout,
            admin=True,
            remedy=DEV_MODE,
        )
        self.http.expect(call, status="paused")
        if not self._paused("pause"):
            raise self.http.failure(call, "answered 200, but /is_paused says it still computes")

    def start(self, version: StagedVersion) -> None:
        """Nothing is sent: `reload_weights` is one call. An engine that computes or sleeps is refused here: an
        update while its memory is unmapped kills the engine core."""
        self._warnings = []
        refuse_adapter(version, self.name)
        if _asleep(self._metrics()):
            raise EngineRefused(f"start: {self.name} sleeps; its weights are loaded again after it wakes up")
        if not self._paused("start"):
            raise EngineRefused(f"start: {self.name} is not paused; pause it before loading {version.label}")

    def update(self, version: StagedVersion) -> None:
        call = Call(
            step="load",
            method="POST",
            path="/collective_rpc",
            json={"method": "reload_weights", "kwargs": {"weights_path": version.folder}},
            touch="starts",
            timeout=self.options.load_timeout(version.manifest.nbytes),
            admin=True,
            remedy=f"Is {version.folder} readable on the engine's host? {DEV_MODE}",
        )
        results = self.http.json_object(call).get("results")
        if not isinstance(results, list) or not results or any(result is not None for result in results):
            raise self.http.failure(call, f"answered results {results!r} instead of one null from each worker")

    def finish(self, version: StagedVersion) -> None:
        """The update ends, then caches are dropped, then the label says so; the resume comes last."""
        self.end_update()
        if self.options.cache == "flush":
            self._flush()
        self.set_label(version.label)

    def end_update(self) -> None:
        """`reload_weights` has ended by itself."""

    def set_label(self, label: str) -> None:
        call = Call(
            step="label",
            method="POST",
            path="/update_weight_version",
            json={"new_version": label},
            touch="done",
            admin=True,
        )
        self.http.expect(call, success=True, new_version=label)

    def confirm(self, version: StagedVersion) -> Confirmation:
        label = self._label("confirm")
        if label != version.label:
            raise ProofFailed(f"confirm: {self.name} reports {label!r} after a load of {version.label!r}")
        fingerprint = self._fingerprint(version) if self.options.fingerprint else ""
        return Confirmation(
            label=label, fingerprint=fingerprint, read_back=self._was_read_back(), warnings=tuple(self._warnings)
        )

    def resume(self) -> None:
        call = Call(step="resume", method="POST", path="/resume", admin=True)
        self.http.expect(call, status="resumed")
        if self._paused("resume"):
            raise self.http.failure(call, "answered 200, but /is_paused says it is still paused")

    def load_adapter(self, name: str, folder: str) -> None:
        """Needs a server with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and no dev mode."""
        body = {"lora_name": name, "lora_path": folder}
        self.http.send(self._adapter_call("load", "/v1/load_lora_adapter", body, ADAPTERS))

    def unload_adapter(self, name: str) -> None:
        self.http.send(self._adapter_call("unload", "/v1/unload_lora_adapter", {"lora_name": name}, ADAPTERS))

    def close(self) -> None:
        self.http.close()

    def _label(self, step: str) -> str:
        call = Call(step=step, method="GET", path="/weight_info", admin=True, remedy=DEV_MODE)
        return str(self.http.field(call, "weight_version", str))

    def _paused(self, step: str) -> bool:
        call = Call(step=step, method="GET", path="/is_paused", admin=True, remedy=DEV_MODE)
        return bool(self.http.field(call, "is_paused", bool))

    def _boot_id(self) -> str:
        return _boot_id(self._metrics())

    def _metrics(self) -> str:
        """Not there with several API servers, which export no process metrics: the label tells of a restart."""
        call = Call(step="status", method="GET", path="/metrics", accept=frozenset({200, 404}))
        return self.http.send(call).text

    def _flush(self) -> None:
        """Drop what was computed with the old weights. A stale prefix gives wrong tokens, so that one must
        succeed; the other two answer 200 without a body, or are not there."""
        prefix = Call(
            step="flush",
            method="POST",
            path="/reset_prefix_cache",
            params={"reset_running_requests": "true"},
            touch="done",
            admin=True,
        )
        self.http.expect(prefix, success=True)
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            self._flush_if_supported(path)

    def _flush_if_supported(self, path: str) -> None:
        accept = frozenset({200, 404, 405, 501})
        call = Call(step="flush", method="POST", path=path, touch="done", accept=accept, admin=True)
        answer = self.http.send(call)
        said_no = isinstance(answer.body, dict) and answer.body.get("success", True) is not True
        if answer.status != 200 or said_no or (answer.text.strip() and not isinstance(answer.body, dict)):
            self._warnings.append(f"POST {path} did not reset: {answer.status} {answer.text[:200]}".rstrip())

    def _checksum(self, seconds: float, touch: Touch) -> str:
        call = Call(
            step="fingerprint",
            method="POST",
            path="/weight_checker",
            json={"action": "checksum"},
            touch=touch,
            accept=frozenset({200, 404}),
            timeout=seconds,
            admin=True,
        )
        answer = self.http.send(call)
        if answer.status == 404:
            return ""
        sums = answer.body.get("checksums") if isinstance(answer.body, dict) else None
        if not isinstance(sums, dict) or not sums:
            raise self.http.failure(call, "answered without checksums", ProofFailed)
        empty = sum(1 for value in sums.values() if value == OF_NOTHING)
        if empty:
            self._warnings.append(f"no fingerprint: vLLM's checksum is of nothing for {empty} of {len(sums)} tensors")
            return ""
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def _asleep(metrics: str) -> bool:
    """`/is_sleeping` (0.32) also says yes to a mere pause."""
    return any(float(awake) == 0 for awake in AWAKE.findall(metrics))


def _boot_id(metrics: str) -> str:
    """The API server's start time, and how often it was woken up: at sleep level 2 it has lost its weights and kept
    its label, and nobody may have looked while it slept."""
    started, wakes = BOOT_TIME.search(metrics), sum(float(count) for count in WAKE_UPS.findall(metrics))
    return (started.group(1) if started else "") + (f"+{wakes:.0f}" if wakes else "")


def _flag(value: bool) -> str:
    return "true" if value else "false"
