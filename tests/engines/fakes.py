"""Engines that answer as vLLM 0.32 and SGLang 0.5.23 do, without weights, and lie where they are told to.

`fake.answers["POST /pause"] = (200, {"status": "nope"})` replaces an answer; an exception as the answer is
raised by the transport. `fake.seen` lists the calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

Answer = tuple[int, Any] | Exception | Callable[[], "Answer"]


class FakeEngine:
    """What both have in common: state, replaced answers, a log of calls."""

    def __init__(self) -> None:
        self.label = "default"
        self.paused = False
        self.boot = 1.0
        self.answers: dict[str, Answer] = {}
        self.seen: list[str] = []
        self.requests: list[httpx.Request] = []

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._handle)

    def body_of(self, call: str) -> dict[str, Any]:
        return json.loads(self.requests[self.seen.index(call)].content)

    def restart(self) -> None:
        self.label, self.paused, self.boot = "default", False, self.boot + 1

    def _handle(self, request: httpx.Request) -> httpx.Response:
        call = f"{request.method} {request.url.path}"
        self.seen.append(call)
        self.requests.append(request)
        body = json.loads(request.content) if request.content else {}
        answer = self.answers.get(call) or self.answer(call, body)
        while callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        status, content = answer
        if isinstance(content, str):
            return httpx.Response(status, text=content)
        return httpx.Response(status, json=content)

    def answer(self, call: str, body: dict[str, Any]) -> Answer:
        raise NotImplementedError


class FakeVllm(FakeEngine):
    """vLLM 0.32 in dev mode."""

    def __init__(self, root: str = "some/hub-id") -> None:
        super().__init__()
        self.root = root
        self.checksums = {"dp0:pp0:pcp0:tp0:w": "0" * 64}
        self.asleep, self.wake_ups = False, 0

    def sleep(self) -> None:
        self.asleep = True

    def wake_up(self) -> None:
        self.asleep, self.wake_ups = False, self.wake_ups + 1

    def metrics(self) -> str:
        asked = 'http_requests_total{handler="/wake_up",method="POST",status="2xx"}'
        return (
            f"# TYPE x gauge\nprocess_start_time_seconds {self.boot}\n"
            f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="awake"}} {float(not self.asleep)}\n'
            f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="discard_all"}} {float(self.asleep)}\n'
            + (f"{asked} {float(self.wake_ups)}\n" if self.wake_ups else "")
        )

    def answer(self, call: str, body: dict[str, Any]) -> Answer:
        if call in ("POST /pause", "POST /resume"):
            self.paused = call == "POST /pause"
        if call == "POST /update_weight_version":
            self.label = body["new_version"]
        return {
            "GET /version": (200, {"version": "0.32.0"}),
            "GET /weight_info": (200, {"weight_version": self.label}),
            "GET /is_paused": (200, {"is_paused": self.paused}),
            "GET /metrics": (200, self.metrics()),
            "GET /v1/models": (200, {"data": [{"id": "m", "root": self.root, "parent": None}]}),
            "POST /pause": (200, {"status": "paused"}),
            "POST /resume": (200, {"status": "resumed"}),
            "POST /collective_rpc": (200, {"results": [None]}),
            "POST /reset_prefix_cache": (200, {"success": True}),
            "POST /reset_mm_cache": (200, ""),
            "POST /reset_encoder_cache": (200, ""),
            "POST /update_weight_version": (200, {"success": True, "new_version": body.get("new_version")}),
            "POST /weight_checker": (200, {"checksums": self.checksums}),
            "GET /get_world_size": (200, {"world_size": 1}),
            "POST /start_weight_update": (200, {}),
            "POST /finish_weight_update": (200, {}),
            "POST /v1/completions": (200, {"choices": [self.choice(body)]}),
        }.get(call, (404, {"detail": "Not Found"}))

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        """Each token of a prompt has the log-probability minus its position."""
        prompt = body.get("prompt", [])
        rows = [None, *({str(token): {"logprob": -float(at)}} for at, token in enumerate(prompt[1:], 1))]
        return {"prompt_logprobs": rows, "token_ids": [7] * body.get("max_tokens", 0)}


class FakeSglang(FakeEngine):
    """SGLang 0.5.23."""

    def __init__(self, path: str = "some/hub-id") -> None:
        super().__init__()
        self.path = path
        self.arguments: dict[str, Any] = {"model_path": path, "tp_size": 1, "pp_size": 1, "dp_size": 1}
        self.session = False

    def answer(self, call: str, body: dict[str, Any]) -> Answer:
        if call in ("POST /pause_generation", "POST /continue_generation"):
            self.paused = call == "POST /pause_generation"
        if call == "POST /update_weights_from_disk":
            self.label, self.path = body["weight_version"], body["model_path"]
        if call == "POST /update_weight_version":
            self.label = body["new_version"]
        if call in ("POST /begin_weight_update", "POST /end_weight_update"):
            return self.open_or_close(call == "POST /begin_weight_update")
        return {
            "GET /model_info": (200, {"weight_version": self.label, "model_path": self.path}),
            "GET /ready": (503 if self.paused else 200, ""),
            "GET /server_info": (
                200,
                {"random_seed": 7, "startup_time": {"tokenizer_e2e": self.boot}, **self.arguments},
            ),
            "POST /pause_generation": (200, {"message": "Generation paused successfully.", "status": "ok"}),
            "POST /continue_generation": (200, {"message": "Generation continued.", "status": "ok"}),
            "POST /update_weights_from_disk": (
                200,
                {"success": True, "message": "Succeeded to update model"},
            ),
            "POST /flush_cache": (200, "Cache flushed.\nPlease check backend logs for more details.\n"),
            "POST /update_weight_version": (200, {"success": True, "new_version": body.get("new_version")}),
            "POST /weights_checker": (200, {"success": True, "per_engine_checksum": "abc"}),
            "POST /generate": (200, self.generated(body)),
        }.get(call, (404, {"detail": "Not Found"}))

    def open_or_close(self, opens: bool) -> Answer:
        if self.session == opens:
            state = "already open" if opens else "not open"
            return 400, {"success": False, "message": f"a weight-update session is {state}; …"}
        self.session = opens
        return 200, {"success": True, "message": "Success"}

    def generated(self, body: dict[str, Any]) -> dict[str, Any]:
        """As FakeVllm's."""
        prompt = body.get("input_ids", [])
        rows = [[None if at == 0 else -float(at), token, None] for at, token in enumerate(prompt)]
        count = body.get("sampling_params", {}).get("max_new_tokens", 0)
        return {"output_ids": [7] * count, "meta_info": {"input_token_logprobs": rows}}


class FakeEmbedded(FakeEngine):
    """The embedded server, as far as its status and Starlette's own answer to an unknown path."""

    def answer(self, call: str, body: dict[str, Any]) -> Answer:
        return {
            "GET /status": (200, {"label": self.label, "boot_id": str(self.boot), "paused": self.paused}),
        }.get(call, (404, "Not Found"))


class FakeWebsite(FakeEngine):
    """No engine at all."""

    def answer(self, call: str, body: dict[str, Any]) -> Answer:
        return (200, "<html>Welcome</html>") if call == "GET /" else (404, "<html>404</html>")
