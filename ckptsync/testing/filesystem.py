"""A file system that does not have every call, as shares, FUSE gateways and mounts without rights are."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from ..errors import InvalidInput

CALLS = {
    "chmod": ("chmod", "fchmod"),
    "fsync": ("fsync", "fdatasync"),
    "link": ("link",),
    "rename": ("rename", "replace"),
}


@contextmanager
def refusing(*calls: str, error: int = errno.EPERM) -> Iterator[None]:
    """Inside, `calls` (some of `chmod`, `fsync`, `link`, `rename`) fail with `error` in this process, each time.

    EPERM is what vfat says to a link, ENOTSUP what many FUSE file systems say, EACCES a mount without rights.
    InvalidInput for a call that is none of these.
    """
    if unknown := set(calls) - CALLS.keys():
        raise InvalidInput(f"refusing({', '.join(sorted(unknown))}): use some of {', '.join(CALLS)}")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    with ExitStack() as stack:
        for name in (name for call in calls for name in CALLS[call]):
            stack.enter_context(mock.patch.object(os, name, refuse))
        yield
