"""The ways to do one task at one place, run in turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec
import s3fs

from benchmarks.peers.clock import Row, Taken, row, take, turns
from tests.servers import seaweed


@dataclass(frozen=True, slots=True)
class Way:
    """`call` is measured, unless it returns what another process took. It is given a folder that is empty."""

    name: str
    call: Callable[[str], Mapping[str, float] | Taken | None]
    lacks: str = ""
    keeps: str = ""
    """Where it writes instead; emptied after each call all the same."""

    grows: bool = False
    """`keeps` is left as it is: what was stored is what it grew by."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes go: `root` is a folder, or bucket/prefix."""

    name: str
    root: str
    url: str
    fs: Any = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    without: frozenset[str] = frozenset()
    """Ways that are left out."""

    @property
    def remote(self) -> bool:
        return self.url.startswith("s3://")

    def fresh(self, name: str) -> str:
        folder = f"{self.root}/{name}"
        if not self.remote:
            os.makedirs(folder, exist_ok=True)
        return folder

    def drop(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(folder, recursive=True)

    def used(self, folder: str) -> int:
        self.fs.invalidate_cache()
        try:
            return int(self.fs.du(folder))
        except FileNotFoundError:
            return 0


@contextlib.contextmanager
def local(name: str, parent: str, without: frozenset[str]) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir=parent, prefix="ckptsync-peers-") as root:
        yield Place(name, root, root, fsspec.filesystem("file"), without=without)


@contextlib.contextmanager
def s3(parent: str, without: frozenset[str]) -> Iterator[Place]:
    """A SeaweedFS process on this machine: its wall time is mostly the server's."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="ckptsync-peers-s3-") as folder:
        server = seaweed.start(folder)
        before = {name: os.environ.get(name) for name in server.environment}
        os.environ.update(server.environment)
        try:
            fs = s3fs.S3FileSystem(**server.options, use_listings_cache=False, skip_instance_cache=True)
            bucket = f"{server.bucket}/peers"
            yield Place("S3", bucket, f"s3://{bucket}", fs, server.options, without)
        finally:
            server.kill()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def compare(
    task: str, place: Place, gb: float, rounds: int, ways: list[Way], before: Callable[[], None] = lambda: None
) -> list[Row]:
    """Each way once per round, in turning order; the first is ours and the base of the ratios."""
    by_name = {way.name: way for way in ways if way.name not in place.without}
    taken: dict[str, list[Taken]] = {name: [] for name in by_name}
    for name in turns(list(by_name), rounds):
        before()
        taken[name].append(_one(by_name[name], place))
    base = taken[ways[0].name]
    return [row(task, place.name, way.name, way.lacks, gb, taken[way.name], base)
            for way in by_name.values()]  # fmt: skip


def _one(way: Way, place: Place) -> Taken:
    folder = way.keeps or place.fresh("out")
    before = place.used(folder) if way.grows else 0
    found: list[Taken] = []

    def call() -> Mapping[str, float] | None:
        told = way.call(folder)
        if isinstance(told, Taken):
            found.append(told)
            return None
        return told if isinstance(told, dict) else None

    own = take(call)
    taken = found[0] if found else own
    stored = place.used(folder) - before
    if not way.grows:
        place.drop(folder)
    return Taken(taken.wall, taken.cpu, taken.peak, {**taken.parts, **({"stored": stored} if stored else {})})


def cool(folder: str) -> None:
    """Out of the page cache, where the file system has one."""
    for parent, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(parent, name), os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def sync(folder: str) -> None:
    """What a save that is to survive a power cut has to do besides."""
    for parent, _, names in os.walk(folder):
        for name in [*names, ""]:
            fd = os.open(os.path.join(parent, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def empty(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder, exist_ok=True)
