"""SGLang over HTTP, stock: pause, `/update_weights_from_disk`, read back, continue. SGLang >= 0.5.12.

Seen on SGLang 0.5.23:

- A truncated shard, a tensor of the wrong shape or an unknown load format kills the whole server; a
  half-copied folder without an index, or zeros in place of data, is loaded with `"success": true`. So what
  is loaded is verified before. Its one completeness check is the index file.
- With requests still queued it loads, then fails to flush, and answers 400 "Weights were updated, but the
  cache was not flushed": the new weights *are* serving, under the old label. `finish` makes up for both.
- Without `weight_version` new weights keep the old label; a number instead of a string is refused.
- After an update `/model_info` names the updated folder as model path; `/server_info` goes on to name the one of the
  start, whose schema it is.
- While it is paused `/ready` is 503 at once and `/health` after 20 s, which gets a pod killed: pause briefly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import httpx
from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from ckptsync.digest import sha256
from ckptsync.engine import Confirmation, EngineStatus, StagedVersion, Versioned
from ckptsync.engine_http import Call, EngineHttp, HttpOptions, Touch
from ckptsync.errors import EngineRefused, InvalidInput, ProofFailed
from ckptsync.manifest import TensorSpec

from ._adapters import AdapterRoutes
from ._kind import told_apart
from ._probe import SglangProbe
from ._proof import ChecksumProof
from ._schema import SchemaMemory, refuse_adapter, refuse_torn

PauseMode = Literal["retract", "abort", "in_place"]
CachePolicy = Literal["flush", "keep"]

ADAPTERS = "It needs SGLang started with --enable-lora, --max-lora-rank and --lora-target-modules."
BASE_LABEL = "default"
LOADED = ("Succeeded to update model weights", "Weights were updated")
UNTOUCHED = ("Failed to get model loader", "Failed to get weights iterator")
FLUSH_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions(HttpOptions):
    """How to update one SGLang server."""

    pause_mode: PauseMode = "retract"
    """What becomes of running requests: `retract` puts them back into the queue and recomputes them under
    the new weights; `abort` returns them as they are; `in_place` freezes them with their KV."""

    cache: CachePolicy = "flush"
    """`keep` leaves the prefix cache: a prompt seen before is then answered from KV of the old weights. With
    `in_place` there is no other way, since a flush needs an idle scheduler."""

    fingerprint: bool = True
    """Ask for a checksum after each load."""

    def __post_init__(self) -> None:
        HttpOptions.__post_init__(self)
        if self.pause_mode not in get_args(PauseMode):
            raise InvalidInput(f"pause_mode must be one of {get_args(PauseMode)}, not {self.pause_mode!r}")
        if self.cache not in get_args(CachePolicy):
            raise InvalidInput(f"cache must be one of {get_args(CachePolicy)}, not {self.cache!r}")
        if self.pause_mode == "in_place" and self.cache == "flush":
            raise InvalidInput("pause_mode 'in_place' keeps the KV of running requests: it needs cache='keep'")


class SglangEngine(ChecksumProof, AdapterRoutes, SglangProbe, Versioned):
    """One SGLang server, behind the engine contract."""

    options: SglangOptions

    def __init__(
        self, url: str, options: SglangOptions | None = None, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        super().__init__()
        self.options = options or SglangOptions()
        self.http = EngineHttp(url, self.options, transport=transport)
        self._schema = SchemaMemory()
        self._warnings: list[str] = []
        self._unflushed = False
        self._asked_to_pause = False

    @property
    def name(self) -> str:
        return f"sglang@{self.http.url}"

    def status(self) -> EngineStatus:
        with told_apart("sglang", self.http.url, self.http.peek):
            label = self._model_info("status", "weight_version")
        return EngineStatus(
            label="" if label == BASE_LABEL else label,
            boot_id=self._boot_id(),
            paused=not self._ready("status"),
        )

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Read from the folder that the server was started with, where that is a folder on this host."""
        info = self._server_info("schema")
        return self._schema.get(boot_of(info), str(info.get("model_path", "")))

    def pause(self) -> None:
        self._pause("no")

    def start(self, version: StagedVersion) -> None:
        """Nothing is sent: an update is one call. An engine that computes is refused here: without a pause
        the update waits for every running request, and one in thirty cannot flush."""
        self._warnings = []
        self._unflushed = False
        self._refuse_unfit(version, "start")
        if self._ready("start"):
            raise EngineRefused(f"start: {self.name} is not paused; pause it before loading {version.label}")

    def update(self, version: StagedVersion) -> None:
        call = self._load_call(version)
        body = self.http.json_object(call)
        message = str(body.get("message", ""))
        if body.get("success") is True:
            return
        # Several data-parallel workers answer in one message, "a | b": it counts as whole only if each part
        # does.
        parts = message.split(" | ")
        if all(part.startswith(LOADED) for part in parts):
            self._unflushed = True
            self._warnings.append("the cache was flushed in a second step: requests were still queued")
        elif all(part.startswith(UNTOUCHED) for part in parts):
            raise self.http.failure(call, f"loaded nothing: {message}", EngineRefused)
        else:
            raise self.http.failure(call, f"answered {json.dumps(body)[:300]}")

    def _load_call(self, version: StagedVersion) -> Call:
        return Call(
            step="load",
            method="POST",
            path="/update_weights_from_disk",
            json={
                "model_path": version.folder,
                "weight_version": version.label,
                "load_format": "auto",  # an unknown one kills the server
                "flush_cache": self.options.cache == "flush",
            },
            touch="starts",
            accept=frozenset({200, 400}),
            timeout=self.options.load_timeout(version.manifest.nbytes),
            admin=True,
            remedy=f"Is {version.folder} readable on the engine's host?",
        )

    def finish(self, version: StagedVersion) -> None:
        """The load has flushed and labelled already, unless it said that it could not flush."""
        if self._unflushed:
            # Who came in between goes back to the queue: a flush needs a scheduler that runs nothing.
            self._pause("done")
            self._flush()
            self.set_label(version.label)
            self._unflushed = False
        self._say_if_kept()

    def set_label(self, label: str) -> None:
        call = Call(
            step="label",
            method="POST",
            path="/update_weight_version",
            # Aborting every request is the route's default.
            json={"new_version": label, "abort_all_requests": False},
            touch="done",
            admin=True,
        )
        self.http.expect(call, success=True, new_version=label)

    def confirm(self, version: StagedVersion) -> Confirmation:
        label = self._model_info("confirm", "weight_version")
        if label != version.label:
            raise ProofFailed(f"confirm: {self.name} reports {label!r} after a load of {version.label!r}")
        fingerprint = self._fingerprint(version) if self.options.fingerprint else ""
        return Confirmation(
            label=label, fingerprint=fingerprint, read_back=self._was_read_back(), warnings=tuple(self._warnings)
        )

    def resume(self) -> None:
        call = Call(step="resume", method="POST", path="/continue_generation", json={}, admin=True)
        self.http.expect(call, status="ok")
        self._asked_to_pause = False
        if not self._ready("resume"):
            raise self.http.failure(call, "answered 200, but /ready is not 200: still paused, or not healthy")

    def load_adapter(self, name: str, folder: str) -> None:
        """Needs a server with `--enable-lora`, and its rank and target modules within what it was started with."""
        body = {"lora_name": name, "lora_path": folder}
        self.http.expect(self._adapter_call("load", "/load_lora_adapter", body, ADAPTERS), success=True)

    def unload_adapter(self, name: str) -> None:
        """Waits for requests that use it. A request that names it later loads it again from its folder."""
        call = self._adapter_call("unload", "/unload_lora_adapter", {"lora_name": name}, ADAPTERS)
        self.http.expect(call, success=True)

    def close(self) -> None:
        self.http.close()

    def _refuse_unfit(self, version: StagedVersion, step: str) -> Mapping[str, Any]:
        """EngineRefused for what SGLang would not survive, or what would leave a part of it on old weights. What the
        server was started with, which is asked for only if the version itself is fit."""
        refuse_adapter(version, self.name)
        refuse_torn(version)
        info = self._server_info(step)
        if info.get("weight_cache_mode") not in (None, "off"):
            raise EngineRefused(f"start: {self.name} shares its weights; restart it with --weight-cache-mode off")
        drafts = info.get("speculative_draft_model_path")
        if drafts not in (None, info.get("model_path")):
            raise EngineRefused(f"start: {self.name} would load the target's weights into its draft model {drafts}")
        return info

    def _say_if_kept(self) -> None:
        if self.options.cache == "keep":
            self._warnings.append("caches kept: KV of the old weights may be reused")

    def _pause(self, touch: Touch) -> None:
        call = Call(
            step="pause",
            method="POST",
            path="/pause_generation",
            json={"mode": self.options.pause_mode},
            touch=touch,
            timeout=self.options.pause_timeout,
            admin=True,
        )
        self.http.expect(call, status="ok")
        self._asked_to_pause = True
        if self._ready("pause"):
            raise self.http.failure(call, "answered 200, but /ready says it still computes")

    def _model_info(self, step: str, name: str) -> str:
        return str(self.http.field(Call(step=step, method="GET", path="/model_info"), name, str))

    def _ready(self, step: str) -> bool:
        """`/ready` is 503 from the moment of a pause. Where it does not exist, what was last asked for
        counts."""
        call = Call(step=step, method="GET", path="/ready", accept=frozenset({200, 404, 503}))
        status = self.http.send(call).status
        return not self._asked_to_pause if status == 404 else status == 200

    def _boot_id(self) -> str:
        """From what SGLang draws and measures at its start: the random seed and the seconds each phase
        took."""
        return boot_of(self._server_info("status"))

    def _server_info(self, step: str) -> dict[str, Any]:
        """What it was started with; not what it has become since."""
        return self.http.json_object(Call(step=step, method="GET", path="/server_info"))

    def _flush(self) -> None:
        """Flush, again until it succeeds. The route's own `timeout` is no use here: it waits for an empty
        queue, and a paused server's queue does not empty. At once it only asks that nothing runs."""
        call = Call(
            step="flush",
            method="POST",
            path="/flush_cache",
            touch="done",
            accept=frozenset({200, 400}),
            admin=True,
        )
        answer = Retrying(
            stop=stop_after_delay(FLUSH_SECONDS),
            wait=wait_fixed(0.2),
            retry=retry_if_result(lambda answer: answer.status != 200),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )(self.http.send, call)
        if answer is None or not answer.text.startswith("Cache flushed"):
            raise self.http.failure(call, f"did not flush within {FLUSH_SECONDS:.0f} s")

    def _checksum(self, seconds: float, touch: Touch) -> str:
        call = Call(
            step="fingerprint",
            method="POST",
            path="/weights_checker",
            json={"action": "checksum"},
            touch=touch,
            accept=frozenset({200, 404}),
            timeout=seconds,
            admin=True,
        )
        answer = self.http.send(call)
        if answer.status == 404:
            return ""
        body = answer.body if isinstance(answer.body, dict) else {}
        checksum = body.get("per_engine_checksum")
        if body.get("success") is not True or not isinstance(checksum, str) or not checksum:
            raise self.http.failure(call, f"answered {answer.text[:200]!r} instead of a checksum", ProofFailed)
        return checksum


def boot_of(info: Mapping[str, Any]) -> str:
    drawn: list[Any] = [info.get("random_seed"), info.get("startup_time")]
    return "" if drawn == [None, None] else sha256(json.dumps(drawn, sort_keys=True).encode())[:16]
