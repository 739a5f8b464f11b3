"""What this host itself refuses, such as one more thread: it passes, so it is waited for, and no bug."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import CkptSyncError, StoreUnavailable

_REMEDIES = {
    errno.EMFILE: "raise `ulimit -n`, or follow fewer engines in one process",
    errno.ENFILE: "raise fs.file-max",
    errno.ENOMEM: "give this process, or its container, more memory",
    errno.ENOLCK: "its file system has no locks: name a folder on a local disk",
    errno.ENOTSUP: "its file system cannot do this: name a folder on a local disk",
}

NO_THREADS = "this host gives no more threads: raise `ulimit -u`, or the pids limit of the container"


def said(error: OSError | MemoryError) -> str:
    """In the system's own words, and what helps."""
    number = errno.ENOMEM if isinstance(error, MemoryError) else error.errno
    text = "Cannot allocate memory" if isinstance(error, MemoryError) else error.strerror or str(error)
    remedy = _REMEDIES.get(number or 0)
    return f"{text} ({remedy})" if remedy else text


@contextmanager
def threads() -> Iterator[None]:
    """StoreUnavailable if a thread that is started in here cannot be had, with what to do about it."""
    try:
        yield
    except RuntimeError as error:
        if not _is_no_thread(error):
            raise
        raise StoreUnavailable(NO_THREADS) from error


@contextmanager
def refusals(doing: str) -> Iterator[None]:
    """StoreUnavailable, naming what was done, for whatever this host refuses in here: files, sockets, memory, threads.
    For loops that go on for as long as their process, around what is not translated where it is called."""
    try:
        yield
    except CkptSyncError:
        raise
    except (OSError, MemoryError) as error:
        raise StoreUnavailable(f"{doing}: {said(error)}") from error
    except RuntimeError as error:
        if not _is_no_thread(error):
            raise
        raise StoreUnavailable(f"{doing}: {NO_THREADS}") from error


def _is_no_thread(error: RuntimeError) -> bool:
    return "can't start new thread" in str(error)
