"""The `vllm.endpoint_plugins` entry point: the watcher inside the API server. vLLM >= 0.26, no dev mode.

    VLLM_PLUGINS=ckptsync CKPTSYNC_ROOT=… vllm serve … --weight-transfer-config '{"backend": "ckptsync"}'

`GET /plugins/ckptsync/health` says which version is proven and why not a newer one: 200 if ready, else 503.
Of several API servers of one port, and of none at all after a crash, the one that holds the lock in the stage
runs the watcher; the others wait for the lock, and their health answers `waiting`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ckptsync.errors import CkptSyncError, InvalidInput
from watchers import locks
from watchers.watcher import Watcher

from .client_engine import ClientEngine

log = logging.getLogger(__name__)

PREFIX = "/plugins/ckptsync"
RETRY_SECONDS = 5.0


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
            log.warning("CKPTSYNC_ROOT is not set: no version will be followed")
            return
        options = {"pause_mode": self.settings.pause_mode, "cache": self.settings.cache}
        engine = ClientEngine(engine_client, asyncio.get_running_loop(), **options)
        self.follower = Follower(self.settings, engine, f"{args.host}:{args.port}")
        self.follower.start()


class Follower:
    """The watcher's thread in one API server; it ends with the process."""

    def __init__(self, settings: Settings, engine: ClientEngine, address: str) -> None:
        self.settings, self.engine = settings, engine
        key = hashlib.sha256(address.encode()).hexdigest()[:12]
        self._lock = os.path.join(settings.stage, f".leader-{key}")
        self._watcher: Watcher | None = None
        self._reason = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckptsync-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def health(self) -> dict[str, Any]:
        if self._watcher is None:
            return {"ready": False, "state": "waiting", "reason": self._reason}
        return asdict(self._watcher.health)

    def _run(self) -> None:
        handle = self._lead()
        if handle is None:
            return
        try:
            watcher = self._open()
            if watcher is not None:
                self._watcher = watcher
                watcher.run(self._stop)
                watcher.close()
        except Exception:
            self._watcher, self._reason = None, "the watcher failed; see the log"
            log.exception("the watcher ended: no newer version will be loaded")
            raise
        finally:
            os.close(handle)

    def _lead(self) -> int | None:
        """The lock, once no other API server of this address holds it."""
        self._reason = "another API server of this engine leads"
        os.makedirs(self.settings.stage, mode=0o700, exist_ok=True)
        while (handle := locks.acquire(self._lock, exclusive=True, wait=False)) is None:
            if self._stop.wait(RETRY_SECONDS):
                return None
        return handle

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
                )
            except InvalidInput:
                raise
            except CkptSyncError as error:
                self._reason = f"{settings.root}: {error}"
                log.warning("%s; trying again", self._reason)
            if self._stop.wait(RETRY_SECONDS):
                return None
