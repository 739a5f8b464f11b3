"""SGLang's weight-update session over HTTP, the half that its tensor and its distributed path have in common.

SGLang >= 0.5.21, which opens and closes a session around the updates. From the source of 0.5.23:

- `success` in the body counts, not the status alone; `begin` refuses a second session, and one that a dead trainer
  left open is ended first.
- The end of a session, which makes quantized weights ready, takes no label, and a label sent with the last bucket
  would be reported before it. So the label is set right after the end, and until then names no version.
- Without `abort_all_requests: false` setting a label aborts every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from ..engine_http import Answer, Call, Touch
from ..errors import EngineRefused, ProofFailed
from .receivers import HttpEngine, partial_label

SESSIONS = "It needs SGLang >= 0.5.21."
FLUSH_SECONDS = 10.0


class SglangReceiver:
    """One SGLang server."""

    def __init__(self, engine: HttpEngine) -> None:
        self.engine, self.http = engine, engine.http

    def why_not(self) -> str | None:
        info = self.http.peek("/server_info")
        if not isinstance(info, dict):
            return f"{self.engine.name} does not answer"
        sizes = {name: info.get(name, 1) for name in ("dp_size", "pp_size")}
        split = [f"{name}={size}" for name, size in sizes.items() if isinstance(size, int) and size > 1]
        return (
            f"{self.engine.name} runs with {', '.join(split)}, which SGLang's updates do not reach" if split else None
        )

    def world_size(self) -> int:
        call = self._call("ranks", "/server_info", method="GET")
        found = self.http.json_object(call).get("tp_size", 1)
        if not isinstance(found, int) or found < 1:
            raise self.http.failure(call, f"answered tp_size {found!r}")
        return found

    def begin(self, label: str) -> None:
        self._set_label(partial_label(label), "no")
        if not self._succeeds("/begin_weight_update", {}):
            self._succeeds("/end_weight_update", {})  # the session of a trainer that died
            call = self._call("begin", "/begin_weight_update", json={}, accept=frozenset({200, 400}))
            answer = self.http.send(call)
            if not _success(answer):
                raise self.http.failure(call, f"answered {answer.status}: {answer.text[:300]}", EngineRefused)

    def finish(self, label: str) -> None:
        self.http.expect(self._call("end", "/end_weight_update", json={}, touch="done"), success=True)
        if getattr(self.engine.http.options, "cache", "flush") == "flush":
            self._flush()
        self._set_label(label, "done")

    def set_label(self, label: str) -> None:
        self._set_label(label, "done")

    def why_no_sums(self) -> str | None:
        # "" is part of every name, so it skips every tensor.
        body = {"action": "checksum", "skip_tensor_list": [""]}
        call = self._call("sums", "/weights_checker", json=body, accept=frozenset({200, 400, 404}))
        answer = self.http.send(call)
        why = f"{self.engine.name} takes no checksums, which need SGLang >= 0.5.12: it answered {answer.text[:200]}"
        return None if _success(answer) else why

    def sums(self, nbytes: int) -> dict[str, str]:
        """64 bits each: of sha256 on a CPU, on a GPU of a hash taken there. All but rotary tables, quantized ones
        dequantized."""
        timeout = self.http.options.load_timeout(nbytes)
        call = self._call("sums", "/weights_checker", json={"action": "checksum"}, touch="done", timeout=timeout)
        body = self.http.json_object(call)
        try:
            ranks = [rank["checksums"].items() for rank in body["ranks"]]
        except (TypeError, KeyError, AttributeError) as error:
            raise self.http.failure(call, f"answered without checksums ({error!r})", ProofFailed) from error
        sums = {f"tp{at}:{name}": str(value) for at, items in enumerate(ranks) for name, value in items}
        if body.get("success") is not True or not sums:
            raise self.http.failure(call, "answered without checksums", ProofFailed)
        return sums

    # -- inside --------------------------------------------------------------------------------------------------------

    def _update(self, path: str, body: Mapping[str, Any], nbytes: int) -> None:
        """The answer comes when every rank has loaded the bucket."""
        timeout = self.http.options.load_timeout(nbytes)
        call = self._call("update", path, json={**body, "flush_cache": False}, touch="starts", timeout=timeout)
        self.http.expect(call, success=True)

    def _succeeds(self, path: str, body: Mapping[str, Any]) -> bool:
        return _success(self.http.send(self._call("begin", path, json=body, accept=frozenset({200, 400}))))

    def _set_label(self, label: str, touch: Touch) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        call = self._call("label", "/update_weight_version", json=body, touch=touch)
        self.http.expect(call, success=True, new_version=label)

    def _flush(self) -> None:
        """At once it only asks that nothing runs; the last step of a request may still do."""
        call = self._call("flush", "/flush_cache", touch="done", accept=frozenset({200, 400}))
        answer = Retrying(
            stop=stop_after_delay(FLUSH_SECONDS),
            wait=wait_fixed(0.2),
            retry=retry_if_result(lambda answer: answer.status != 200),
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )(self.http.send, call)
        if answer.status != 200:
            raise self.http.failure(call, f"answered {answer.status}: {answer.text[:300]}")

    def _call(self, step: str, path: str, *, method: str = "POST", **more: Any) -> Call:
        return Call(step=step, method=method, path=path, admin=True, remedy=SESSIONS, **more)


def _success(answer: Answer) -> bool:
    return answer.status == 200 and isinstance(answer.body, dict) and answer.body.get("success") is True
