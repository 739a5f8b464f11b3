"""vLLM's native weight transfer over HTTP, the half that its IPC and NCCL backends have in common.

Routes of `VLLM_SERVER_DEV_MODE=1`. From the sources of 0.26 to 0.33, and seen on 0.32:

- A worker has at most one session open. One that is left by a trainer that died refuses the next start with a 500;
  it is ended by a finish without a label, which leaves a well-formed mix.
- After an update that failed, the worker that failed has dropped its session and others may not have.
- A finish with a label sets it on every rank's engine, after all have finished (0.27). 0.26 has no labels; what it
  is sent is ignored, and reading back fails.
- Neither resets the prefix cache. A pause does; who paused otherwise is flushed once more here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ..engine_http import Call, Touch
from ..errors import EngineError, EngineRefused, ProofFailed
from .receivers import HttpEngine, partial_label

DEV_MODE = "It needs vLLM started with VLLM_SERVER_DEV_MODE=1."
OF_NOTHING = hashlib.sha256(b"").hexdigest()
"""The sum of a parameter whose values lie elsewhere: of linear layers on a CPU, which are packed."""


class VllmReceiver:
    """One vLLM server. `backend` is its `--weight-transfer-config`."""

    backend: str

    def __init__(self, engine: HttpEngine) -> None:
        self.engine, self.http = engine, engine.http

    def why_not(self) -> str | None:
        found = self.http.peek("/server_info?config_format=json")
        if not isinstance(found, dict):
            return None if self._answers() else f"{self.engine.name} does not answer"
        return self._why_not(found)

    def _why_not(self, info: Mapping[str, Any]) -> str | None:
        config = info.get("vllm_config")
        transfer = config.get("weight_transfer_config") if isinstance(config, dict) else None
        backend = transfer.get("backend") if isinstance(transfer, dict) else None
        if isinstance(config, dict) and backend != self.backend:
            wanted = f"""--weight-transfer-config '{{"backend": "{self.backend}"}}'"""
            return f"{self.engine.name} was started with the backend {backend!r}, not {wanted}"
        return None

    def world_size(self) -> int:
        call = self._call("ranks", "/get_world_size", method="GET", params={"include_dp": "true"})
        found = self.http.json_object(call).get("world_size")
        if not isinstance(found, int) or found < 1:
            raise self.http.failure(call, f"answered world_size {found!r}")
        return found

    def begin(self, label: str) -> None:
        self._set_label(partial_label(label))
        call = self._call("start", "/start_weight_update", accept=frozenset({200, 500}))
        if self.http.send(call).status == 500:
            self._renew_connection()
            end = self._call("start", "/finish_weight_update", accept=frozenset({200, 500}))
            self.http.send(end)  # the session of a trainer that died
            self._renew_connection()
            answer = self.http.send(call)
            if answer.status != 200:
                raise self.http.failure(call, f"answered {answer.status}: {answer.text[:300]}", EngineRefused)

    def finish(self, label: str) -> None:
        flush = self._call("flush", "/reset_prefix_cache", params={"reset_running_requests": "true"}, touch="done")
        self.http.expect(flush, success=True)
        self.http.send(self._call("finish", "/finish_weight_update", json={"weight_version": label}, touch="done"))

    def set_label(self, label: str) -> None:
        self._set_label(label, "done")

    def why_no_sums(self) -> str | None:
        # Refused where the route is (from 0.32 on), before anything is summed: there is nothing to compare with.
        call = self._call("sums", "/weight_checker", json={"action": "compare"}, accept=frozenset({200, 400, 404, 405}))
        answer = self.http.send(call)
        why = f"{self.engine.name} takes no checksums, which need vLLM >= 0.32: it answered {answer.text[:200]}"
        return None if answer.status == 400 else why

    def sums(self, nbytes: int) -> dict[str, str]:
        """sha256 on the host, about 1.5 GB/s for each rank."""
        timeout = self.http.options.load_timeout(nbytes)
        call = self._call("sums", "/weight_checker", json={"action": "checksum"}, touch="done", timeout=timeout)
        found = self.http.json_object(call).get("checksums")
        if not isinstance(found, dict) or not found:
            raise self.http.failure(call, "answered without checksums", ProofFailed)
        return {tensor: "" if value == OF_NOTHING else str(value) for tensor, value in found.items()}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _update(self, info: Mapping[str, Any], nbytes: int) -> None:
        """The answer comes when every rank has loaded the bucket."""
        timeout = self.http.options.load_timeout(nbytes)
        call = self._call(
            "update", "/update_weights", json={"update_info": dict(info)}, touch="starts", timeout=timeout
        )
        try:
            self.http.send(call)
        except EngineError:
            self._renew_connection()
            raise

    def _release(self) -> tuple[int, int]:
        """Major and minor version of the server; (0, 0) where it does not say."""
        found = self.http.peek("/version")
        text = str(found.get("version", "")) if isinstance(found, dict) else ""
        parts = text.split(".")
        return (int(parts[0]), int(parts[1])) if len(parts) > 2 and all(p.isdigit() for p in parts[:2]) else (0, 0)

    def _init(self, info: Mapping[str, Any], timeout: float | None = None) -> None:
        call = self._call("connect", "/init_weight_transfer_engine", json={"init_info": dict(info)}, timeout=timeout)
        self.http.send(call)

    def _set_label(self, label: str, touch: Touch = "no") -> None:
        # 404 from 0.26, which has none.
        call = self._call(
            "label", "/update_weight_version", json={"new_version": label}, touch=touch, accept=frozenset({200, 404})
        )
        self.http.send(call)

    def _answers(self) -> bool:
        return isinstance(self.http.peek("/is_paused"), dict)

    def _renew_connection(self) -> None:
        """vLLM 0.32 resets the connection after a 500, when the next request may be on its way already. A GET is
        repeated by itself; a POST is not."""
        self.http.peek("/is_paused")

    def _call(self, step: str, path: str, *, method: str = "POST", **more: Any) -> Call:
        return Call(step=step, method=method, path=path, admin=True, remedy=DEV_MODE, **more)
