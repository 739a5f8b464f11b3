"""Which engines there are, looked up anew at every poll: given, from a router, a file or a DNS name.

A source that does not answer counts as unchanged: a router that restarts does not empty the fleet.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from ckptsync import host, logs
from ckptsync.errors import CkptSyncError, EngineUnavailable, InvalidInput, NotFound

log = logs.get(__name__)

ROUTER_SECONDS = 5.0


class Source(Protocol):
    """Where engines are found."""

    def urls(self) -> Sequence[str]:
        """Base URLs of engines. A CkptSyncError if it cannot be said now."""
        ...


class Given:
    """Those of `--url`."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)

    def urls(self) -> Sequence[str]:
        return self._urls


class EnginesFile:
    """One URL on each line; blank lines and those that begin with `#` do not count."""

    def __init__(self, path: str) -> None:
        self.path = path

    def urls(self) -> Sequence[str]:
        """Read at every poll: it is small, and a ConfigMap is swapped behind a symbolic link."""
        try:
            with open(self.path, encoding="utf-8") as file:
                lines = [line.strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise NotFound(f"engines file {self.path}: {error}") from error
        return [line for line in lines if line and not line.startswith("#")]


class Dns:
    """Every A record of `host:port`, such as a headless Kubernetes service.

    IPv4 alone: with AAAA records beside them each engine would be there twice.
    """

    def __init__(self, name: str) -> None:
        self.host, _, port = name.rpartition(":")
        if not self.host or not port.isdecimal():
            raise InvalidInput(f"a DNS name of engines is host:port, not {name!r}")
        self.port = int(port)

    def urls(self) -> Sequence[str]:
        try:
            found = socket.getaddrinfo(self.host, self.port, socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise EngineUnavailable(f"DNS name {self.host}: {error}") from error
        return sorted({f"http://{address[0]}:{self.port}" for *_, address in found})


class _Worker(msgspec.Struct):
    url: str


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class Router:
    """The workers behind an SGLang router, which has no route that changes weights (sglang-router 0.3.2).

    `GET /workers` answers `{"workers": [{"url", "is_healthy", "worker_type", "connection_mode", ...}], "total",
    "stats"}`. With `--dp-aware` a server is listed once for each data-parallel rank, as `http://host:port@rank`: one
    update reaches all its ranks. One that is not healthy is listed too, rightly: a paused SGLang is not healthy.
    Workers that speak gRPC have no HTTP routes, and are left out with a warning.
    """

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url, self._api_key = url.rstrip("/"), api_key
        self._complained: set[str] = set()

    def urls(self) -> Sequence[str]:
        import httpx

        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        try:
            answer = httpx.get(f"{self.url}/workers", headers=headers, timeout=ROUTER_SECONDS)
            answer.raise_for_status()
            listed = [worker.url for worker in msgspec.json.decode(answer.content, type=_Workers).workers]
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
            raise EngineUnavailable(f"router {self.url}: GET /workers: {error}") from error
        return [re.sub(r"@\d+$", "", url) for url in listed if self._speaks_http(url)]

    def _speaks_http(self, url: str) -> bool:
        if url.startswith(("http://", "https://")):
            return True
        if url not in self._complained:
            self._complained.add(url)
            log.warning(
                "router %s: %s does not speak HTTP and cannot be updated",
                self.url,
                url,
                extra={"event": "engine-unusable"},
            )
        return False


class Roster:
    """The engines of all sources together, each once."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._last: dict[int, Sequence[str]] = {}
        self._problems: dict[int, str] = {}

    @property
    def problems(self) -> Mapping[int, str]:
        """What is wrong with which source, by its place."""
        return self._problems

    def urls(self) -> list[str]:
        """In the order of the sources. Never raises a CkptSyncError: a source that fails counts as unchanged."""
        for place, source in enumerate(self._sources):
            try:
                with host.refusals("the engines cannot be looked up"):
                    self._last[place] = source.urls()
                self._problems.pop(place, None)
            except CkptSyncError as error:
                if place not in self._problems:
                    log.warning("%s; the engines stay as they were", error, extra={"event": "roster-away"})
                self._problems[place] = str(error)
        known = [url.rstrip("/") for place in sorted(self._last) for url in self._last[place]]
        return list(dict.fromkeys(known))
