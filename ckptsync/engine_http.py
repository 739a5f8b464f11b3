"""HTTP to an inference engine: every answer is looked at, every failure says what it means for the weights.

An engine's HTTP 200 is no proof: SGLang 0.5.23 answers 200 to a half-copied checkpoint, vLLM 0.32 to one
with a layer missing. So a call returns its body only when the body has the right form, and the adapters
read back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from .errors import EngineDirty, EngineError, EngineRefused, EngineUnavailable, InvalidInput

Touch = Literal["no", "starts", "done"]
"""What a call means for the weights: harmless; the call that changes them; or made after they were
changed."""

ONE_CALL_EACH = httpx.Limits(max_keepalive_connections=0)
"""A connection for each call. A kept one may be closed by the server just as the next call goes out (uvicorn, under
vLLM and SGLang, gives an idle one 5 s), and a load whose connection broke has to be taken for a half-done one."""

NEVER_RUN = frozenset({401, 403, 404, 405, 413, 415, 422})
"""Answers that come from the server's front door: the call's work was not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """How to talk to one engine server."""

    api_key: str = field(default="", repr=False)
    """Sent as `Authorization: Bearer …`."""

    admin_key: str = field(default="", repr=False)
    """Sent instead of `api_key` to routes that change the engine (SGLang's `--admin-api-key`)."""

    timeout: float = 30.0
    """Seconds that the engine may take to answer a call."""

    connect_timeout: float = 5.0
    """Seconds to reach the server at all."""

    pause_timeout: float = 120.0
    """Seconds that a pause may take; it may have to wait for running requests."""

    min_load_rate: float = 100e6
    """Bytes per second that a load does at least: its timeout is `timeout + bytes / min_load_rate`."""

    attempts: int = 3
    """Tries of a call that is safe to repeat: reads, and whatever never reached the server."""

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "pause_timeout", "min_load_rate", "attempts"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name} must be positive, not {getattr(self, name)!r}")

    def load_timeout(self, nbytes: int) -> float:
        return self.timeout + nbytes / self.min_load_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, with what it takes to explain its failure."""

    step: str
    """What is being done, for the error message: `pause`, `load`, ..."""

    method: str
    path: str
    touch: Touch = "no"
    accept: frozenset[int] = frozenset({200})
    """Statuses that are answers; any other is an error."""

    admin: bool = False
    timeout: float | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with an accepted status."""

    status: int
    text: str
    body: Any
    """The parsed JSON; None where the text is not JSON."""


def checked_url(url: str) -> str:
    """Without a slash at its end. InvalidInput for what is no http:// or https:// address of a server."""
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InvalidInput(f"engine url {url!r}: {error}") from error
    if base.scheme not in {"http", "https"} or not base.host or base.userinfo:
        raise InvalidInput("an engine url is http://host:port or https://host:port; pass a key as api_key")
    return str(base).rstrip("/")


def silence(url: str, error: Exception) -> str:
    """What `EngineError.silent` is to say of a request that failed like this."""
    return url if isinstance(error, httpx.TimeoutException) else ""


class EngineHttp:
    """The HTTP side of one engine."""

    def __init__(self, url: str, options: HttpOptions, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = checked_url(url)
        self.options = options
        self._client = httpx.Client(base_url=self.url, transport=transport, limits=ONE_CALL_EACH)

    def close(self) -> None:
        self._client.close()

    def json_object(self, call: Call) -> dict[str, Any]:
        """The JSON object that answers the call; anything else is an error."""
        body = self.send(call).body
        if not isinstance(body, dict):
            raise self.failure(call, "answered with something that is not a JSON object")
        return body

    def field(self, call: Call, name: str, kind: type[str] | type[bool]) -> Any:
        """One field of the answering object, of the right type."""
        value = self.json_object(call).get(name)
        if not isinstance(value, kind):
            raise self.failure(call, f"answered without a {kind.__name__} {name!r}")
        return value

    def expect(self, call: Call, **fields: object) -> None:
        """Raise unless the answering object has these fields with these values."""
        body = self.json_object(call)
        wrong = {name: body.get(name) for name, value in fields.items() if body.get(name) != value}
        if wrong:
            raise self.failure(call, f"answered {_short(json.dumps(body))} instead of {fields}")

    def send(self, call: Call) -> Answer:
        """The answer, if its status is an accepted one. Retries what is safe to repeat."""
        try:
            response = self._retrying(call)(self._request, call)
        except httpx.TransportError as error:
            raise self._no_answer(call, error) from error
        except (httpx.DecodingError, httpx.InvalidURL) as error:
            raise self.failure(call, f"answered with something unreadable ({error})") from error
        if response.status_code not in call.accept:
            raise self._refusal(call, response)
        return Answer(response.status_code, response.text, _parse(response))

    def peek(self, path: str) -> Any:
        """The JSON at a path; None where there is none, or no answer."""
        try:
            return self.send(Call(step="status", method="GET", path=path)).body
        except EngineError:
            return None

    def relay(self, method: str, path: str, content: bytes, seconds: float) -> httpx.Response:
        """Another's request, with this one's key. The answer is looked at by who made it; httpx.TransportError for
        none."""
        key = self.options.admin_key or self.options.api_key
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        timeout = httpx.Timeout(seconds, connect=self.options.connect_timeout)
        return self._client.request(method, path, content=content, headers=headers, timeout=timeout)

    def failure(self, call: Call, what: str, kind: type[EngineError] | None = None) -> EngineError:
        """The error for an answer that is no success: dirty if the weights may have been touched."""
        kind = kind or (EngineRefused if call.touch == "no" else EngineDirty)
        means = {
            "no": "",
            "starts": " The load may be half done.",
            "done": " The weights are already changed.",
        }
        text = f"{call.step}: {call.method} {self.url}{call.path} {what}."
        if issubclass(kind, EngineDirty):
            text += means[call.touch] + " Load a version completely before the engine serves again."
        return kind(f"{text} {call.remedy}".rstrip())

    def _request(self, call: Call) -> httpx.Response:
        options = self.options
        key = (options.admin_key if call.admin else "") or options.api_key
        return self._client.request(
            call.method,
            call.path,
            params=dict(call.params) or None,
            json=None if call.json is None else dict(call.json),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(call.timeout or options.timeout, connect=options.connect_timeout),
        )

    def _retrying(self, call: Call) -> Retrying:
        again: tuple[type[Exception], ...] = (httpx.ConnectError, httpx.ConnectTimeout)
        if call.method == "GET":
            # Not ReadTimeout: a call is to end after its timeout, not after three.
            again = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)
        return Retrying(
            stop=stop_after_attempt(self.options.attempts),
            wait=wait_exponential(multiplier=0.2, max=2.0),
            retry=retry_if_exception(lambda error: isinstance(error, again)),
            reraise=True,
        )

    def _no_answer(self, call: Call, error: httpx.TransportError) -> EngineError:
        never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol)
        untouched = call.touch == "no" or (call.touch == "starts" and never_sent)
        if isinstance(error, httpx.TimeoutException):
            what = f"got no answer within {call.timeout or self.options.timeout:.0f} s ({type(error).__name__})"
        else:
            what = f"got no answer ({type(error).__name__}: {error})"
        failure = self.failure(call, what, EngineUnavailable if untouched else EngineDirty)
        failure.silent = silence(self.url, error)
        return failure

    def _refusal(self, call: Call, response: httpx.Response) -> EngineError:
        status = response.status_code
        what = f"answered {status}: {_short(response.text)}"
        if status in {401, 403}:
            what += " (is the api_key or the admin_key the one that the server was started with?)"
        if call.touch == "no":
            return self.failure(call, what, EngineUnavailable if status in {502, 503, 504} else EngineRefused)
        never_run = call.touch == "starts" and status in NEVER_RUN
        return self.failure(call, what, EngineRefused if never_run else EngineDirty)


def _parse(response: httpx.Response) -> Any:
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:297] + "..."
