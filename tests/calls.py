"""The n-th call on a folder that fails, whichever it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CALLS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.chmod"}

_armed: list[Callable[[str, tuple[Any, ...]], None]] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    for hook in _armed:
        hook(event, arguments)


@contextmanager
def failing_at(folder: str, number: int, error: int) -> Iterator[Callable[[], int]]:
    """The call number `number`, from 0 on, of those that open, make, rename, list or remove something at `folder` or
    below fails with `error`. Yields how many there were so far. Any thread of this process."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in CALLS and _is_below(folder, arguments[0]):
            count += 1
            if count == number + 1:
                raise OSError(error, os.strerror(error), arguments[0])

    _armed.append(hook)
    try:
        yield lambda: count
    finally:
        _armed.remove(hook)


def _is_below(folder: str, path: object) -> bool:
    return isinstance(path, str) and (path == folder or path.startswith(folder + os.sep))


sys.addaudithook(_audit)  # for good: a hook cannot be taken away
