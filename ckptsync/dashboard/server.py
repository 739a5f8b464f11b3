"""The page over HTTP. Only GET, and nothing is ever written to the store.

GET /                          the page
GET /data                      one look at the channel
GET /version?version=e1-v42    one version in detail
GET /manifest?version=e1-v42   its manifest, as stored
GET /compare?version=e1-v42    what it changed since the one before, or &base=e1-v7: reads both versions' weights
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs

import msgspec

from ..errors import CkptSyncError, Corrupt, InvalidInput, NotFound, StoreError
from ..http_server import Answer, Request, Server, bind, checked_token, error_answer, has_token, json_answer
from .board import Board
from .page import served_page

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STATUS: tuple[tuple[type[CkptSyncError], int], ...] = (
    (InvalidInput, 400),
    (NotFound, 404),
    (Corrupt, 422),
    (StoreError, 502),
    (CkptSyncError, 500),
)
_PORT = re.compile(r":\d+$")
_LOCAL = {"127.0.0.1", "localhost", "[::1]"}


@contextmanager
def serving(board: Board, address: str, *, token: str = "") -> Iterator[Server]:
    """The page on `[HOST]:PORT` inside `with`; `server.url` says where. Without a host on loopback.

    InvalidInput for an address that cannot be had, and for one that others can reach without a `token`: a browser asks
    for it as the password, of any user.
    """
    routes = _Routes(board, checked_token(token))
    server = bind(address, routes.answer, open_to_all=not token, variable="CKPTSYNC_DASHBOARD_TOKEN")
    server.start()
    try:
        yield server
    finally:
        server.close()


class _Routes:
    def __init__(self, board: Board, token: str) -> None:
        self._token = token
        self._routes: dict[str, Callable[[str, str], Answer]] = {
            "/": lambda *_: Answer(
                status=200, body=served_page(board.every), content_type="text/html; charset=utf-8", headers=_HEADERS
            ),
            "/data": lambda *_: _json(board.page()),
            "/version": lambda version, _: json_answer(200, board.detail(version), _HEADERS),
            "/manifest": lambda version, _: _json(board.manifest(version)),
            "/compare": lambda version, base: _json(msgspec.json.encode(board.compare(version, base))),
        }

    def answer(self, request: Request) -> Answer:
        """Never raises a CkptSyncError: it is in the answer."""
        path, _, query = request.target.partition("?")
        if (refused := self._refusal(request)) is not None:
            return refused
        if path not in self._routes:
            return error_answer(404, "no-such-page", f"{path} is not among {', '.join(self._routes)}")
        try:
            asked = parse_qs(query)
            return self._routes[path](asked.get("version", ["latest"])[0], asked.get("base", [""])[0])
        except CkptSyncError as error:
            status = next(code for kind, code in _STATUS if isinstance(error, kind))
            return error_answer(status, error.kind, str(error), headers=_HEADERS)

    def _refusal(self, request: Request) -> Answer | None:
        if self._token and not has_token(request, self._token):
            asked = {"WWW-Authenticate": 'Basic realm="ckptsync: any user, the token as password", charset="UTF-8"'}
            return error_answer(401, "unauthorized", "send the dashboard's token", headers=asked)
        host = request.headers.get("host", "")
        if not self._token and _PORT.sub("", host) not in _LOCAL:
            # A page elsewhere may let its own name point to loopback (DNS rebinding), and read what is here.
            return error_answer(403, "foreign-host", f"this is not {host!r}: use its own address, or give it a token")
        if request.headers.get("sec-fetch-site") in {"cross-site", "same-site"} and request.target != "/":
            # An image on a page elsewhere could otherwise start a comparison.
            return error_answer(403, "cross-origin", "pages elsewhere may link to this page, and ask it nothing")
        if request.method not in {"GET", "HEAD"}:
            return error_answer(405, "method-not-allowed", "this page only reads", headers={"Allow": "GET, HEAD"})
        return None


def _json(body: bytes) -> Answer:
    return Answer(status=200, body=body, headers=_HEADERS)
