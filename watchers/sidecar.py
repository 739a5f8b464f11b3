"""HTTP for whoever looks after an engine: probes, version, wake, load, metrics. On threads of its own.

    GET  /healthz                    200 while the watch loop turns; open to all, for a liveness probe
    GET  /readyz[?min_version=42]    200 with a confirmed version; 409, to be tried again, while it is below 42
    GET  /version                    health of the whole and of each engine
    POST /wake                       look at the store now
    POST /load {"version": "e1-v42"} load it and stay on it; "latest" goes back to following
    GET  /metrics                    for Prometheus

Answers come from memory: neither store nor engine is asked, so a slow one cannot fail a probe. `/load` alone
waits, for the watcher's own thread, which makes the load between two steps; a client that goes away does not
stop it. See docs/operating.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol, Self
from urllib.parse import parse_qsl

import msgspec

from ckptsync.errors import (
    CkptSyncError,
    Conflict,
    Corrupt,
    EngineRefused,
    EngineUnavailable,
    InvalidInput,
    NotFound,
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
)
from ckptsync.http_server import Answer, Request, bind, checked_token, error_answer, has_token, json_answer
from ckptsync.version import VersionId, parse_label, parse_query

from .health import Health, Receipt
from .metrics import CONTENT_TYPE, Metrics

STALLED_SECONDS = 300.0
"""A loop that shows no sign of life for longer than it meant to rest and this counts as hung."""

WORKING_STALLED_SECONDS = 3600.0
"""The same within a stage or a load. An engine's adapter bounds its own calls, another watcher of this host may be
staging the same version for us, and to be killed in mid-load leaves an engine paused: so this is the long stop."""

_AT_REST = frozenset({"idle", "serving", "dirty"})

_STATUS: tuple[tuple[type[CkptSyncError], int], ...] = (
    (InvalidInput, 400),
    (NotFound, 404),
    (Conflict, 409),
    (EngineRefused, 409),
    (SchemaMismatch, 422),
    (Corrupt, 422),
    (EngineUnavailable, 503),
    (StoreUnavailable, 503),
    (StoreError, 502),
    (CkptSyncError, 500),
)


class Watched(Protocol):
    """What a sidecar serves: a Watcher, or a fleet of them. All of it may be asked from any thread, and at once.

    Its `on_receipt` goes to `Metrics.observe`; a receipt's `engine` is a name among `members`.
    """

    @property
    def health(self) -> Health: ...

    @property
    def silence(self) -> float | None:
        """Seconds since its loop should have shown a sign of life; None while none runs."""
        ...

    def members(self) -> Mapping[str, Health]: ...

    def wake(self) -> None: ...

    def load_version(self, text: str) -> Receipt: ...


class Load(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `/load`: `42`, `e1-v42` or `latest`."""

    version: str | int


class _Route(NamedTuple):
    method: str
    answer: Callable[[Request, Mapping[str, str]], Answer]
    parameters: frozenset[str] = frozenset()


class Sidecar:
    """Bound once made, answering inside `with`. `address`: `[HOST]:PORT`; without a host loopback, port 0 a free
    one.

    InvalidInput for an address that cannot be had, and for one that others can reach without a `token`, which
    every request but `/healthz` then carries as a Bearer.
    """

    def __init__(self, watched: Watched, metrics: Metrics, address: str, *, token: str = "") -> None:
        self._watched, self._metrics = watched, metrics
        self._token = checked_token(token)
        self._loading = threading.Lock()
        self._routes = {
            "/healthz": _Route("GET", self._healthz),
            "/readyz": _Route("GET", self._readyz, frozenset({"min_version"})),
            "/version": _Route("GET", self._version),
            "/wake": _Route("POST", self._wake),
            "/load": _Route("POST", self._load),
            "/metrics": _Route("GET", self._render),
        }
        self._server = bind(address, self.answer, open_to_all=not token, variable="CKPTSYNC_SIDECAR_TOKEN")

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. Answers under way have two seconds."""
        self._server.close()

    def answer(self, request: Request) -> Answer:
        """Never raises a CkptSyncError: it is in the answer."""
        path, _, query = request.target.partition("?")
        route = self._routes.get(path)
        if path != "/healthz" and self._token and not has_token(request, self._token):
            message = "send the sidecar's token: Authorization: Bearer …"
            return error_answer(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})
        if route is None:
            return error_answer(404, "no-such-endpoint", f"{path} is not among {', '.join(self._routes)}")
        if route.method != request.method.replace("HEAD", "GET"):
            allowed = "GET, HEAD" if route.method == "GET" else "POST"
            return error_answer(405, "method-not-allowed", f"{path} wants {allowed}", headers={"Allow": allowed})
        if route.method == "POST" and "origin" in request.headers:
            return error_answer(403, "cross-origin", "pages in a browser may not change what an engine serves")
        try:
            return route.answer(request, _parameters(query, route.parameters))
        except CkptSyncError as error:
            return self._failed(error)

    # -- the endpoints -----------------------------------------------------------------------------------------

    def _healthz(self, _: Request, __: Mapping[str, str]) -> Answer:
        silence, state = self._watched.silence, self._watched.health.state
        limit = STALLED_SECONDS if state in _AT_REST else WORKING_STALLED_SECONDS
        if silence is None:
            return error_answer(503, "not-running", "the watch loop does not run: restart this process")
        if silence > limit:
            message = (
                f"no sign of life from the watch loop for {silence:.0f} s in state {state!r}, {limit:.0f} s allowed"
            )
            return error_answer(503, "stalled", f"{message}: restart this process")
        return json_answer(200, {"alive": True, "state": state, "silence": round(silence, 3)})

    def _readyz(self, _: Request, parameters: Mapping[str, str]) -> Answer:
        health, least = self._watched.health, parameters.get("min_version", "0")
        reaches, standing = _reaches(least), _standing(health)
        if not health.ready:
            return error_answer(503, "not-ready", health.reason, retryable=True, **standing)
        if not reaches(parse_label(health.version)):
            message = f"serves {health.version}, which is below {least}"
            return error_answer(409, "version-behind", message, retryable=True, min_version=least, **standing)
        return json_answer(200, {"ready": True, **standing})

    def _version(self, _: Request, __: Mapping[str, str]) -> Answer:
        engines = {name: asdict(health) for name, health in self._watched.members().items()}
        return json_answer(200, {**asdict(self._watched.health), "engines": engines})

    def _wake(self, _: Request, __: Mapping[str, str]) -> Answer:
        self._watched.wake()
        return json_answer(202, {"accepted": True})

    def _load(self, request: Request, _: Mapping[str, str]) -> Answer:
        version = _wanted(request.body)
        if self._watched.silence is None:
            return error_answer(503, "not-running", "the watch loop does not run yet, or no more", retryable=True)
        if not self._loading.acquire(blocking=False):
            return error_answer(409, "busy", "another /load is under way", retryable=True)
        try:
            receipt = self._watched.load_version(version)
        finally:
            self._loading.release()
        return json_answer(200 if receipt.state == "serving" else 500, receipt.as_dict())

    def _render(self, _: Request, __: Mapping[str, str]) -> Answer:
        body = self._metrics.render(self._watched.members(), self._watched.silence)
        return Answer(status=200, body=body, content_type=CONTENT_TYPE)

    # -- inside ------------------------------------------------------------------------------------------------

    def _failed(self, error: CkptSyncError) -> Answer:
        health, status = self._watched.health, next(code for kind, code in _STATUS if isinstance(error, kind))
        return error_answer(status, error.kind, str(error), retryable=status == 503, **_standing(health))


def _standing(health: Health) -> dict[str, Any]:
    return {"version": health.version, "state": health.state}


def _parameters(query: str, known: frozenset[str]) -> dict[str, str]:
    """InvalidInput for one that is not known: a `min_versoin` that is ignored would pass for ready."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=8)
    except ValueError as error:
        raise InvalidInput(f"the query {query!r} cannot be read: {error}") from None
    for name, _ in pairs:
        if name not in known:
            raise InvalidInput(f"{name!r} is no parameter here; known: {', '.join(sorted(known)) or 'none'}")
    if len(dict(pairs)) != len(pairs):
        raise InvalidInput("a parameter is given twice")
    return dict(pairs)


def _wanted(body: bytes) -> str:
    try:
        version = str(msgspec.json.decode(body, type=Load).version)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f'the body is JSON such as {{"version": "e1-v42"}}: {error}') from None
    parse_query(version)
    return version


def _reaches(least: str) -> Callable[[VersionId | None], bool]:
    """Is a version `least`, or after it in the order of versions; by number alone if `least` names no epoch?"""
    epoch, number = parse_query(least)
    if number is None:
        raise InvalidInput(f"min_version is a version such as 42 or e1-v42, not {least!r}")
    if epoch is None:
        return lambda version: version is not None and version.number >= number
    return lambda version: version is not None and version >= (epoch, number)
