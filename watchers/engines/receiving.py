"""Modules of this process behind HTTP, for a trainer that sends to them over gloo: one, or several that serve together.

    engine = ComposedEngine({"ar": ar, "diffusion": diffusion})
    uvicorn.run(receiving(engine), port=8000)            # the trainer's side: EmbeddedEngine("http://...:8000")

    GET  /status       {"label", "boot_id", "paused"}
    POST /pause        waits for computations under way         POST /resume       refused on half of a version
    POST /receive/join, /start, /bucket, /finish: see `receiver`
    GET  /fingerprint  {"label", "fingerprint"} of what was sent, taken anew from the live tensors

There is no authentication: whoever reaches the port may replace the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ckptsync.errors import CkptSyncError, EngineRefused
from ckptsync.transports.base import LocalEngine
from ckptsync.transports.wire import Finish, Join, Names, Start

from ._application import Application
from .receiver import Receiver


def receiving(engine: LocalEngine) -> Starlette:
    """See the module's docstring."""
    receiver = Receiver(engine)

    def fingerprint() -> dict[str, str]:
        sent = receiver.read_back()
        return {"label": sent.label, "fingerprint": sent.digest} if sent else {"label": "", "fingerprint": ""}

    return answering([*receiver_routes(engine, receiver), Route("/fingerprint", control(fingerprint))])


def in_process(engine: LocalEngine, receiver: Receiver) -> Application:
    """The same routes without a socket."""
    return Application(answering(receiver_routes(engine, receiver)))


def receiver_routes(engine: LocalEngine, receiver: Receiver) -> list[Route]:
    def resume() -> None:
        receiver.check_whole()
        engine.resume()

    return [
        Route("/status", control(engine.status)),
        Route("/pause", control(engine.pause), methods=["POST"]),
        Route("/resume", control(resume), methods=["POST"]),
        Route("/receive/join", told(receiver.join, Join), methods=["POST"]),
        Route("/receive/start", told(receiver.start, Start), methods=["POST"]),
        Route("/receive/bucket", told(receiver.bucket, Names), methods=["POST"]),
        Route("/receive/finish", told(receiver.finish, Finish), methods=["POST"]),
    ]


def answering(routes: list[Route]) -> Starlette:
    """Errors are answered by their stable kind."""
    return Starlette(routes=routes, exception_handlers={CkptSyncError: _refused, msgspec.DecodeError: _refused})


def told(call: Callable[[Any], object], body: type[msgspec.Struct]) -> Callable[[Request], Any]:
    """A route that takes a JSON body of this form."""

    async def answer(request: Request) -> JSONResponse:
        answered = await asyncio.to_thread(call, msgspec.json.decode(await request.body(), type=body))
        return as_json({} if answered is None else answered)

    return answer


def control(call: Callable[[], Any]) -> Callable[[Request], Any]:
    """A route without a body."""

    async def answer(_: Request) -> JSONResponse:
        return as_json(await asyncio.to_thread(call))

    return answer


def as_json(value: object) -> JSONResponse:
    return JSONResponse(msgspec.to_builtins(value))


async def _refused(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, CkptSyncError):
        return JSONResponse({"kind": error.kind, "message": str(error)}, status_code=409)
    return JSONResponse({"kind": EngineRefused.kind, "message": str(error)}, status_code=400)
