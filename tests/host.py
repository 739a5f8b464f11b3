"""What a host does to processes: a root that is unmounted, no more threads, no more files."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def unmounted(root: str) -> Iterator[None]:
    """An empty folder is in its place, as under a mount that is away; after it all is there again, and only that."""
    os.rename(root, f"{root}-away")
    os.mkdir(root)
    try:
        yield
    finally:
        os.rename(root, f"{root}-under")
        os.rename(f"{root}-away", root)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many more are to be had. (No `ulimit -u` binds root.)"""
    real, left = threading._start_new_thread, count  # type: ignore[attr-defined]

    def start(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("can't start new thread")
        return real(*arguments)

    threading._start_new_thread = start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        threading._start_new_thread = real  # type: ignore[attr-defined]


@contextmanager
def files(count: int) -> Iterator[None]:
    """So many more can be open in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    holes = []
    while (lowest := os.open(os.devnull, os.O_RDONLY)) < _highest():
        holes.append(lowest)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for hole in holes:
            os.close(hole)


def _highest() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
