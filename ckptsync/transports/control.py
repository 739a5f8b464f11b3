"""HTTP to receivers that answer as `watchers.engines.embedded_server` does: JSON, and errors by their stable kind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx
import msgspec

from .. import logs
from ..engine_http import ONE_CALL_EACH, silence
from ..errors import (
    CkptSyncError,
    EngineDirty,
    EngineRefused,
    EngineUnavailable,
    OutOfOrder,
    ProofFailed,
    SchemaMismatch,
    VersionExists,
)

T = TypeVar("T")

log = logs.get(__name__)

SLOW_SECONDS = 5.0
"""After which the log says whose answer is waited for."""

_KINDS: dict[str, type[CkptSyncError]] = {
    kind.kind: kind
    for kind in (EngineDirty, EngineRefused, EngineUnavailable, OutOfOrder, ProofFailed, SchemaMismatch, VersionExists)
}


class _Problem(msgspec.Struct):
    kind: str = ""
    message: str = ""


class Control:
    """Requests are made once: a call that changes weights is not repeated by the wire, but by whoever knows why."""

    def __init__(self) -> None:
        self._client = httpx.Client(trust_env=False, limits=ONE_CALL_EACH)

    def post(self, engine: object, path: str, body: msgspec.Struct, answer: type[T], *, seconds: float) -> T:
        """EngineUnavailable if there is no answer; the receiver's own error if it says no; EngineRefused for an answer
        that is not a receiver's."""
        base, wire = url_of(engine), getattr(engine, "wire", None)
        url = base + path
        client = self._client if wire is None else httpx.Client(transport=wire)
        try:
            with _told_if_slow(url):
                got = client.post(url, content=msgspec.json.encode(body), timeout=seconds)
        except httpx.HTTPError as error:
            failure = EngineUnavailable(f"POST {url}: no answer ({error or type(error).__name__})")
            failure.silent = silence(base, error)
            raise failure from error
        if got.status_code >= 400:
            raise _refusal(url, got)
        try:
            return msgspec.json.decode(got.content, type=answer)
        except msgspec.DecodeError as error:
            raise EngineRefused(f"POST {url}: not a receiver's answer ({error})") from error

    def close(self) -> None:
        self._client.close()


@contextmanager
def _told_if_slow(url: str) -> Iterator[None]:
    more = {"extra": {"event": "engine-slow"}}
    timer = threading.Timer(SLOW_SECONDS, log.warning, ("no answer for %g s to POST %s", SLOW_SECONDS, url), more)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refusal(url: str, got: httpx.Response) -> CkptSyncError:
    try:
        said = msgspec.json.decode(got.content, type=_Problem)
    except msgspec.DecodeError:
        said = _Problem()
    kind: type[CkptSyncError] = _KINDS.get(said.kind, EngineUnavailable if got.status_code >= 500 else EngineRefused)
    return kind(f"POST {url}: {said.message or f'answered {got.status_code}'}")


def url_of(engine: object) -> str:
    """The engine's address; empty for one that has none. One that is not behind a socket has a `wire` too: a transport
    of httpx."""
    url = getattr(engine, "url", "")
    return url if isinstance(url, str) else ""
