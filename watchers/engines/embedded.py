"""The embedded server as an engine, over HTTP. The server is `python -m watchers.engines.embedded_server`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ckptsync.engine import Confirmation, EngineStatus, ReadBack, StagedVersion, Versioned
from ckptsync.errors import (
    EngineDirty,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    InvalidInput,
    ProofFailed,
    SchemaMismatch,
)
from ckptsync.manifest import TensorSpec

from ._kind import told_apart

if TYPE_CHECKING:
    import httpx

BYTES_PER_SECOND = 50 << 20
"""A load slower than this, besides the fixed timeout, counts as hung."""

_ERRORS: dict[str, type[EngineError]] = {
    kind.kind: kind for kind in (EngineDirty, EngineRefused, EngineUnavailable, ProofFailed, SchemaMismatch)
}


class EmbeddedEngine(Versioned):
    """The adapter. Times out after `timeout` seconds, and for a load after as long again as its bytes may
    take."""

    def __init__(self, url: str, *, timeout: float = 60.0, transport: httpx.BaseTransport | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidInput(f"engine url {url!r}: use http://host:port or https://host:port")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._transport = transport
        self._client: httpx.Client | None = None

    @property
    def name(self) -> str:
        return f"embedded@{self.url}"

    def status(self) -> EngineStatus:
        with told_apart("module", self.url, self._peek):
            try:
                return msgspec.convert(self._ask("GET", "/status"), EngineStatus)
            except msgspec.ValidationError as error:
                raise EngineRefused(f"{self.name}: GET /status: {error}") from error

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

    def read_back(self) -> ReadBack:
        return "values"

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        body = {"token_ids": list(token_ids), "first": first}
        return msgspec.convert(self._ask("POST", "/score", body), list[float])

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        body = {"token_ids": list(token_ids), "max_new_tokens": count}
        return msgspec.convert(self._ask("POST", "/generate", body)["token_ids"], list[int])

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, method: str, path: str, body: object = None, *, timeout: float | None = None) -> Any:
        """The answer's JSON. An answer of 400 or more carries the kind of the error; any other is not ours."""
        import httpx

        from ckptsync.engine_http import ONE_CALL_EACH, silence

        self._client = self._client or httpx.Client(trust_env=False, transport=self._transport, limits=ONE_CALL_EACH)
        try:
            answer = self._client.request(method, self.url + path, json=body, timeout=timeout or self.timeout)
        except httpx.HTTPError as error:
            failure = EngineUnavailable(f"{self.name}: {method} {path}: {error or type(error).__name__}")
            failure.silent = silence(self.url, error)
            raise failure from error
        content = _parse(answer.content)
        if answer.status_code < 400 and content is not msgspec.UNSET:
            return content
        said = content if isinstance(content, dict) else {}
        if (kind := _ERRORS.get(said.get("kind", ""))) is not None:
            raise kind(f"{self.name}: {said.get('message', '')}")
        raise _foreign(answer.status_code, path)(
            f"{self.name}: {method} {path}: answered {answer.status_code}: {answer.text[:200]}"
        )

    def _peek(self, path: str) -> Any:
        try:
            return self._ask("GET", path)
        except EngineError:
            return None


def _foreign(status: int, path: str) -> type[EngineError]:
    """What an answer without a kind means: a server in trouble, or one that is not ours."""
    if path == "/load":
        return EngineDirty
    return EngineUnavailable if status >= 500 else EngineRefused


def _parse(content: bytes) -> Any:
    """UNSET for what is not JSON: None is the server's answer to a pause."""
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return msgspec.UNSET
