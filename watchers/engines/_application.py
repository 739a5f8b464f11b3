"""An ASGI application of this process, asked without a socket."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx


class Application(httpx.BaseTransport):
    """Answers requests from `app` in the event loop `loop`: while that runs nothing, in the caller's thread; while it
    runs, from any other thread. Without one, in a loop and a thread of the request's own."""

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        # A route's own bug is answered by 500, as over a socket.
        self._application = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._loop is None:
            with ThreadPoolExecutor(1) as alone:  # the caller may be in a loop, as in an async actor
                return alone.submit(asyncio.run, self._answer(request)).result()
        if self._loop.is_running():
            return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result()
        return self._loop.run_until_complete(self._answer(request))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        response = await self._application.handle_async_request(request)
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())
