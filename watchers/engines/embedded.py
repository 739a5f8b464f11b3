"""The embedded server as an engine, over HTTP. The server is `python -m watchers.engines.embedded_server`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ckptsync.engine import Confirmation, EngineStatus, StagedVersion
from ckptsync.errors import (
    EngineDirty,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    ProofFailed,
    SchemaMismatch,
)
from ckptsync.manifest import TensorSpec

if TYPE_CHECKING:
    import httpx

BYTES_PER_SECOND = 50 << 20
"""A load slower than this, besides the fixed timeout, counts as hung."""

_ERRORS: dict[str, type[EngineError]] = {
    kind.kind: kind for kind in (EngineDirty, EngineRefused, EngineUnavailable, ProofFailed, SchemaMismatch)
}


class EmbeddedEngine:
    """The adapter. Times out after `timeout` seconds, and for a load after as long again as its bytes may
    take."""

    def __init__(self, url: str, *, timeout: float = 60.0) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self._client: httpx.Client | None = None

    @property
    def name(self) -> str:
        return f"embedded@{self.url}"

    def status(self) -> EngineStatus:
        return msgspec.convert(self._ask("GET", "/status"), EngineStatus)

    def schema(self) -> Mapping[str, TensorSpec]:
        return msgspec.convert(self._ask("GET", "/schema"), dict[str, TensorSpec])

    def pause(self) -> None:
        self._ask("POST", "/pause", timeout=self.timeout + 600)

    def start(self, version: StagedVersion) -> None:  # noqa: ARG002
        """EngineRefused if it is not paused. `update` checks the version, before anything is touched."""
        if not self.status().paused:
            raise EngineRefused(f"{self.name}: is not paused")

    def update(self, version: StagedVersion) -> None:
        """One call loads and, when all is in, sets the label. No answer counts as dirty: it may have
        begun."""
        seconds = self.timeout + version.manifest.nbytes / BYTES_PER_SECOND
        try:
            self._ask("POST", "/load", {"folder": version.folder, "label": version.label}, timeout=seconds)
        except EngineUnavailable as error:
            raise EngineDirty(f"no answer to the load of {version.label}: {error}") from error

    def finish(self, version: StagedVersion) -> None:
        """Nothing is left to do: the server keeps no cache between requests."""

    def confirm(self, version: StagedVersion) -> Confirmation:
        """The server digests its live tensors and compares them with the manifest of the folder that it
        loaded."""
        seconds = self.timeout + version.manifest.nbytes / BYTES_PER_SECOND
        found = msgspec.convert(self._ask("GET", "/fingerprint", timeout=seconds), Confirmation)
        if found.label != version.label:
            raise ProofFailed(f"{self.name}: reports {found.label or 'no version'!r} after loading {version.label}")
        return found

    def resume(self) -> None:
        self._ask("POST", "/resume")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, method: str, path: str, body: object = None, *, timeout: float | None = None) -> Any:
        """The answer's JSON. An answer of 400 or more carries the kind of the error; any other is not
        ours."""
        import httpx

        self._client = self._client or httpx.Client(trust_env=False)
        try:
            answer = self._client.request(method, self.url + path, json=body, timeout=timeout or self.timeout)
            content = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineUnavailable(f"{self.name}: {method} {path}: {error or type(error).__name__}") from error
        if answer.status_code < 400:
            return content
        kind, message = content.get("kind", ""), content.get("message", answer.text)
        raise _ERRORS.get(kind, EngineDirty)(f"{self.name}: {message}")
