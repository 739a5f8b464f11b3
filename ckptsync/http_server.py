"""A small HTTP server on threads, for probes, control and pages: bounded in bytes, seconds and connections.

The standard library's, since a sidecar has six routes and must be up at once in a small image; what that library
leaves open is closed here. A connection carries one request, must have sent it within READ_SECONDS however slowly
it drips, and is turned away while MAX_CONNECTIONS are open. Errors are JSON too.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import io
import ipaddress
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

import msgspec

from . import logs
from .errors import InvalidInput

log = logs.get(__name__)

READ_SECONDS = 10.0
WRITE_SECONDS = 10.0
MAX_BODY = 16 << 10
MAX_CONNECTIONS = 256
_DRAINED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`target` is the path with its query; `headers` have lower-case names."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What goes back; the body is left out for HEAD."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


def json_answer(status: int, value: object, headers: Mapping[str, str] | None = None) -> Answer:
    """A JSON document on a line."""
    return Answer(status=status, body=msgspec.json.encode(value) + b"\n", headers=headers or {})


def error_answer(
    status: int,
    kind: str,
    message: str,
    *,
    retryable: bool = False,
    headers: Mapping[str, str] | None = None,
    **more: object,
) -> Answer:
    """Every error has this shape. A retryable one says to come again in a second."""
    retry = {"Retry-After": "1"} if retryable else {}
    value = {"kind": kind, "message": message, "retryable": retryable, **more}
    return json_answer(status, value, {**retry, **(headers or {})})


def has_token(request: Request, token: str) -> bool:
    """Does it carry the token, as a Bearer, or as the password of Basic, which browsers ask people for?"""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Header values are bytes that were read as latin-1.
    raw = given.strip().encode("latin-1", "replace")
    if scheme.lower() == "basic":
        with suppress(binascii.Error):
            raw = base64.b64decode(raw, validate=True).partition(b":")[2]
            return hmac.compare_digest(raw, token.encode())
    return scheme.lower() == "bearer" and hmac.compare_digest(raw, token.encode())


def checked_token(token: str) -> str:
    """InvalidInput for one that no header can carry."""
    if token != token.strip() or not token.isprintable():
        raise InvalidInput("the token has white space or a line end around it, which no header can carry: remove it")
    return token


class Server(ThreadingMixIn, TCPServer):
    """Bound and listening once made, OSError if that cannot be; answers between `start` and `close`.

    Not http.server.HTTPServer, which asks the DNS for this host's name: that may take seconds.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, family: socket.AddressFamily, address: tuple[Any, ...], answer: Callable[[Request], Answer]
    ) -> None:
        self.address_family, self.answer = family, answer
        self._changed, self._open = threading.Condition(), 0
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="ckptsync-http", daemon=True)
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def start(self) -> None:
        self._thread.start()

    def close(self, grace: float = 2.0) -> None:
        """Take nothing new, and leave `grace` seconds to the answers under way."""
        if self._thread.is_alive():
            self.shutdown()
        with self._changed:
            self._changed.wait_for(lambda: not self._open, grace)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            full = self._open >= MAX_CONNECTIONS
            self._open += not full
        if full:
            more = {"event": "http-turned-away"}
            log.warning("%s is turned away: %d connections are open", client_address, MAX_CONNECTIONS, extra=more)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # no thread left on this host
            self._answered()
            log.warning("%s is turned away: %s", client_address, error, extra={"event": "http-turned-away"})
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._answered()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)  # no descriptor left: the connection waits, and `select` would say so at once, and again
            raise

    def _answered(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - socketserver's signature
        if isinstance(sys.exception(), OSError):
            log.debug("%s went away", client_address, exc_info=True, extra={"event": "http-client-gone"})
        else:
            log.error("a request from %s failed", client_address, exc_info=True, extra={"event": "http-failed"})


def bind(address: str, answer: Callable[[Request], Answer], *, open_to_all: bool, variable: str) -> Server:
    """A server on `[HOST]:PORT`; without a host loopback, port 0 a free one.

    InvalidInput for an address that cannot be had, and for one that others can reach while all may ask (`open_to_all`);
    `variable` says where a token is given.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(f"{address!r} is no address to serve on: use [HOST]:PORT, such as :8080 or 0.0.0.0:8080")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    try:
        family, _, _, _, where = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidInput(f"{host!r} cannot be resolved: {error}") from error
    if open_to_all and not ipaddress.ip_address(where[0]).is_loopback:
        raise InvalidInput(
            f"{address} can be reached from other hosts: give a token ({variable}), or serve on loopback"
        )
    try:
        return Server(family, where, answer)
    except OSError as error:
        raise InvalidInput(f"{address} cannot be served on: {error.strerror}; choose another port") from error


class _Rejected(Exception):
    """Answered before anybody looks at what was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


class _Handler(BaseHTTPRequestHandler):
    server: Server
    default_request_version = "HTTP/1.0"  # HTTP/0.9, the library's, has no status line to refuse with

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection))

    def do_GET(self) -> None:
        try:
            body = self._body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(method=self.command, target=self.path, headers=headers, body=body)
            self._send(self.server.answer(request))
        except _Rejected as rejected:
            self._send(rejected.answer)
            self._drain()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET  # noqa: N815 - the library's names

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") is not None:
            raise _Rejected(error_answer(411, "length-required", "send a Content-Length, not chunks"))
        lengths = self.headers.get_all("Content-Length", ["0"])
        if len(lengths) != 1 or not re.fullmatch(r"[0-9]{1,15}", lengths[0]):
            raise _Rejected(error_answer(400, "bad-request", "Content-Length is one decimal number"))
        if int(lengths[0]) > MAX_BODY:
            raise _Rejected(error_answer(413, "too-large", f"a body has at most {MAX_BODY} bytes"))
        try:
            return self.rfile.read(int(lengths[0]))
        except TimeoutError:
            raise _Rejected(
                error_answer(408, "timeout", f"the request did not come within {READ_SECONDS:.0f} s")
            ) from None

    def _send(self, answer: Answer) -> None:
        self.connection.settimeout(WRITE_SECONDS)
        with suppress(OSError):  # whoever asked is gone
            self.send_response(answer.status)
            headers = {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body)), **answer.headers}
            for name, value in {**headers, "Connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

    def _drain(self) -> None:
        """Who is cut off while sending never reads the answer: TCP resets the connection under it."""
        left = _DRAINED
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (data := self.rfile.read(1 << 12)):
                left -= len(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What the library itself refuses, such as a header that is too long."""
        phrase = HTTPStatus(code).phrase
        self._send(error_answer(code, phrase.lower().replace(" ", "-"), message or phrase))
        self._drain()

    def version_string(self) -> str:
        return "ckptsync"

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args, extra={"event": "http-request"})


class _UntilDeadline(io.RawIOBase):
    """What a connection sends within READ_SECONDS from now on, together; then TimeoutError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._end = connection, time.monotonic() + READ_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
