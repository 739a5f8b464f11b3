"""What the tests of folders share: looking at one, and os calls that fail."""

from __future__ import annotations

import os

from ckptsync.store import LocalStore


def names(store: LocalStore) -> list[str]:
    return sorted(entry.path for entry in store.list(""))


def files_on_disk(store: LocalStore) -> list[str]:
    return sorted(name for _, _, files in os.walk(store.url) for name in files)


def failing(number: int, *, times: int = 1 << 30, real=None):
    """A stand-in for an os call that fails `times` times and then does what `real` does."""
    left = [times]

    def call(*args, **kwargs):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call
