"""The `vllm.endpoint_plugins` entry point: the watcher inside the API server. vLLM >= 0.26, no dev mode.

    VLLM_PLUGINS=ckptsync CKPTSYNC_ROOT=… vllm serve … --weight-transfer-config '{"backend": "ckptsync"}'

`GET /plugins/ckptsync/health` says which version is proven and why not a newer one: 200 if ready, else 503.
Of several API servers of one port, and of none at all after a crash, the one that holds the engine's claim runs
the watcher; the others wait for it, and their health answers `waiting`. So does one beside which `ckptsync watch` runs.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from ckptsync import logs
from ckptsync.errors import CkptSyncError, EngineRefused, InvalidInput, StoreError
from watchers import levels
from watchers.claims import claimed
from watchers.watcher import Watcher

from .client_engine import ClientEngine

log = logs.get(__name__)

PREFIX = "/plugins/ckptsync"
RETRY_SECONDS = 5.0

EXIT_SECONDS = 5.0
"""For the last step at exit. One that is in mid-load waits for an engine that is ending too, and is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """From the environment: `CKPTSYNC_` and the field's name in capitals."""

    root: str
    stage: str = "/dev/shm/ckptsync"  # noqa: S108 - the stage checks that its folder there is our own
    follow: str = "latest"
    reader: str = ""
    poll: float = 1.0
    pause_mode: str = "keep"
    cache: str = "flush"
    proof: int = levels.DEFAULT
    require_signature: str | None = None

    def __post_init__(self) -> None:
        if self.pause_mode not in {"keep", "wait", "abort"}:
            raise InvalidInput(f"CKPTSYNC_PAUSE_MODE is keep, wait or abort, not {self.pause_mode!r}")
        if self.cache not in {"flush", "keep"}:
            raise InvalidInput(f"CKPTSYNC_CACHE is flush or keep, not {self.cache!r}")
        if not self.poll > 0:
            raise InvalidInput("CKPTSYNC_POLL is a positive number of seconds")


def settings_from(environ: Mapping[str, str]) -> Settings | None:
    """None without CKPTSYNC_ROOT. InvalidInput for a value that is none."""
    names = Settings.__dataclass_fields__
    found: dict[str, Any] = {name: environ[key] for name in names if (key := f"CKPTSYNC_{name.upper()}") in environ}
    if "root" not in found:
        return None
    try:
        found["poll"] = float(found.get("poll", "1.0"))
    except ValueError:
        raise InvalidInput("CKPTSYNC_POLL is a positive number of seconds") from None
    try:
        found["proof"] = levels.check_level(int(found.get("proof", levels.DEFAULT)))
    except ValueError as error:
        raise InvalidInput(f"CKPTSYNC_PROOF: {error}") from None
    return Settings(**found)


class CkptsyncEndpoint:
    """What vLLM asks of an endpoint plugin."""

    name = "ckptsync"
    required_tasks = None

    def __init__(self) -> None:
        self.settings = settings_from(os.environ)
        self.follower: Follower | None = None

    def attach_router(self, app: Any) -> None:
        from fastapi.responses import JSONResponse

        async def health() -> JSONResponse:
            state = self.follower.health() if self.follower is not None else {"ready": False, "state": "off"}
            return JSONResponse(state, status_code=200 if state["ready"] else 503)

        app.add_api_route(f"{PREFIX}/health", health, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:  # noqa: ARG002 - vLLM's signature
        """Starts the watcher's thread. A server without CKPTSYNC_ROOT serves what it was started with."""
        if self.settings is None or engine_client is None:
            log.warning("CKPTSYNC_ROOT is not set: no version will be followed", extra={"event": "no-root"})
            return
        options = {"pause_mode": self.settings.pause_mode, "cache": self.settings.cache}
        engine = ClientEngine(engine_client, asyncio.get_running_loop(), **options)
        host = args.host or "127.0.0.1"
        self.follower = Follower(self.settings, engine, f"http://{f'[{host}]' if ':' in host else host}:{args.port}")
        self.follower.start()


class Follower:
    """The watcher's thread in one API server; it ends with the process, and is given a moment to say so."""

    def __init__(self, settings: Settings, engine: ClientEngine, url: str) -> None:
        self.settings, self.engine, self.url = settings, engine, url
        self._watcher: Watcher | None = None
        self._reason = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptsync-watcher", daemon=True)

    def start(self) -> None:
        atexit.register(self.stop, EXIT_SECONDS)
        self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """End the watcher, which withdraws its receipt, after what it is at; wait so long at most."""
        atexit.unregister(self.stop)
        self._stop.set()
        self._thread.join(seconds)

    def health(self) -> dict[str, Any]:
        if self._watcher is None:
            return {"ready": False, "state": "waiting", "reason": self._reason}
        return asdict(self._watcher.health)

    def _run(self) -> None:
        with ExitStack() as claim:
            try:
                watcher = self._open() if self._lead(claim) else None
                if watcher is not None:
                    self._watcher = watcher
                    watcher.run(self._stop)
                    watcher.close()
            except Exception:
                self._watcher, self._reason = None, "the watcher failed; see the log"
                log.exception("the watcher ended: no newer version will be loaded", extra={"event": "watch-ended"})
                raise

    def _lead(self, claim: ExitStack) -> bool:
        """Once no other API server of this engine, and no watcher beside it, follows a channel."""
        while True:
            try:
                claim.enter_context(claimed(self.settings.stage, self.url, self.settings.root))
            except EngineRefused as error:
                self._reason = f"another API server of this engine leads, or a watcher beside it: {error}"
            except StoreError as error:
                if self._reason != str(error):
                    log.warning("%s; trying again", error, extra={"event": "away", "kind": error.kind})
                self._reason = str(error)
            else:
                return True
            if self._stop.wait(RETRY_SECONDS):
                return False

    def _open(self) -> Watcher | None:
        """The channel may not be there yet: the trainer may start after the engine."""
        settings = self.settings
        while True:
            try:
                return Watcher(
                    settings.root,
                    self.engine,
                    follow=settings.follow,
                    stage=settings.stage,
                    reader=settings.reader or None,
                    poll=settings.poll,
                    proof=settings.proof,
                    require_signature=settings.require_signature,
                )
            except InvalidInput:
                raise
            except CkptSyncError as error:
                self._reason = f"{settings.root}: {error}"
                log.warning("%s; trying again", self._reason, extra={"event": "away", "kind": error.kind})
            if self._stop.wait(RETRY_SECONDS):
                return None
