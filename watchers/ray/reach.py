"""How the fast transports reach an engine in an actor: their requests over HTTP, carried by Ray, without a socket.

    trainer's rank 0                                   the actor
    VllmNccl, VllmIpc, Gloo, ...                       vLLM's or SGLang's own routes, or a module's receiver
      └─ httpx ─ Wire ──── ckptsync_request (Ray) ────> Reach
    tensors: over the transport's own group, or by handle

So what a refusal, a late answer or none means for the weights is decided where it is for servers (`engine_http`), and
nobody else on the network reaches a route that replaces weights.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from ckptsync.engine import Engine
from ckptsync.errors import EngineRefused
from ckptsync.transports.base import LocalEngine
from ckptsync.transports.receivers import HttpEngine

from .calls import get

if TYPE_CHECKING:
    from watchers.engines.receiver import Receiver

JSON = {"content-type": "application/json"}
HERE = "http://in-this-process"


class Asked(NamedTuple):
    """A request."""

    method: str
    path: str
    """With its query."""

    content: bytes
    seconds: float


class Reach:
    """In the actor: an engine, for files by steps and for a trainer's requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine = engine
        self.by_steps: Any = engine
        self._received: tuple[LocalEngine, Receiver] | None = None
        if isinstance(engine, LocalEngine):  # one receiver for both: neither begins while the other is under way
            from watchers.engines.receiver import Received, Receiver  # whoever has such an engine has torch

            self._received = engine, Receiver(engine)
            self.by_steps = Received(*self._received)

    def answer(self, asked: Asked) -> tuple[int, bytes]:
        """Status and body. EngineRefused where the engine has no routes."""
        if self._routes is not None:
            request = httpx.Request(asked.method, HERE + asked.path, content=asked.content, headers=JSON)
            answer = self._routes.handle_request(request)
        elif isinstance(self.engine, HttpEngine):
            answer = self.engine.http.relay(asked.method, asked.path, asked.content, asked.seconds)
        else:
            raise EngineRefused(f"{self.engine.name}: {type(self.engine).__name__} has no routes: it loads from files")
        return answer.status_code, answer.read()

    @cached_property
    def _routes(self) -> httpx.BaseTransport | None:
        """Made when they are asked for: loading from files needs no web framework."""
        if self._received is not None:
            from watchers.engines.receiving import in_process

            return in_process(*self._received)
        return self.engine.routes() if hasattr(self.engine, "routes") else None


class Wire(httpx.BaseTransport):
    """On the trainer: httpx's way to an EngineActor. What Ray says of an actor that is late, dead or away is what httpx
    says of such a server."""

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor: Any = actor

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        seconds = request.extensions["timeout"]["read"]
        asked = Asked(request.method, request.url.raw_path.decode(), request.read(), seconds)
        ref = self._actor.ckptsync_request.remote(asked)
        try:
            status, content = get(ref, seconds)
        except GetTimeoutError as error:
            ray.cancel(ref)
            raise httpx.ReadTimeout(f"no answer within {seconds:g} s", request=request) from error
        except RayError as error:
            raise httpx.ReadError(str(error).strip().splitlines()[0], request=request) from error
        except httpx.TransportError:  # of a server behind the actor
            raise
        except EngineRefused as error:
            status, content = 404, msgspec.json.encode({"kind": error.kind, "message": str(error)})
        except Exception as error:  # noqa: BLE001 - a bug there is what it is in a server
            status, content = 500, msgspec.json.encode({"message": f"{type(error).__name__}: {error}"})
        return httpx.Response(status, content=content, headers=JSON)
