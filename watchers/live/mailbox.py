"""Words for the ranks of an engine that serves: one named pipe for each, in a folder beside the staged versions.

SGLang has no call that reaches its workers without first waiting for every running request. A pipe has a reader while
the rank lives, so that a dead rank is told from a busy one at once.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator

PREFIX = ".mailbox-"


def open_mailbox(parent: str, name: str) -> str:
    """The folder of the mailbox `name`, new or not. Those beside it are removed where all that read them are gone."""
    folder = os.path.join(parent, PREFIX + name)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for other in os.listdir(parent):
        path = os.path.join(parent, other)
        if other.startswith(PREFIX) and path != folder and _is_abandoned(path):
            shutil.rmtree(path)
    return folder


def listen(folder: str, rank: int, hear: Callable[[bytes], None]) -> None:
    """Hand each line that is posted to this rank to `hear`, in a thread of its own, while the process lives."""
    path = _pipe(folder, rank)
    if not os.path.exists(path):
        os.mkfifo(path, mode=0o600)
    # For writing too: a pipe without a writer would be at its end.
    pipe = open(os.open(path, os.O_RDWR), "rb")  # noqa: SIM115 - the thread closes it
    threading.Thread(target=_hear, args=(pipe, hear), name="ckptsync-mailbox", daemon=True).start()


def post(folder: str, ranks: int, line: bytes) -> bool:
    """Post one line, shorter than 4096 bytes, to every rank. False if one of them does not listen."""
    pipes = [_open_to_write(_pipe(folder, rank)) for rank in range(ranks)]
    try:
        for pipe in pipes:
            if pipe is not None:
                os.write(pipe, line + b"\n")  # in one piece, up to PIPE_BUF
        return None not in pipes
    finally:
        for pipe in pipes:
            if pipe is not None:
                os.close(pipe)


def _hear(pipe: Iterator[bytes], hear: Callable[[bytes], None]) -> None:
    for line in pipe:
        hear(line)


def _pipe(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank}")


def _open_to_write(path: str) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO):  # no pipe yet; nobody reads it any more
            return None
        raise


def _is_abandoned(folder: str) -> bool:
    pipes = [_open_to_write(os.path.join(folder, name)) for name in os.listdir(folder)]
    for pipe in pipes:
        if pipe is not None:
            os.close(pipe)
    return bool(pipes) and all(pipe is None for pipe in pipes)
