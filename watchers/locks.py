"""Locks between the processes of one host: flock on local files, released by the kernel when a holder dies.

Only for the stage, which is local by definition. Nothing on the shared store is ever locked: two mounts of
one FUSE file system were seen not to exclude each other, and lock files on NFS go stale.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def acquire(path: str, *, exclusive: bool, wait: bool = True) -> int | None:
    """A descriptor that holds the lock until it is closed; None if it is taken and `wait` is false."""
    operation = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, operation)
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        if is_still(handle, path):
            return handle
        os.close(handle)  # the file was removed while we waited: its lock excludes nobody any more


def is_still(handle: int, path: str) -> bool:
    """Whether a lock that is held is the one that others would wait for."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


@contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Hold the lock alone, waiting for it as long as it takes."""
    handle = acquire(path, exclusive=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
