"""The folder `doctor/` of a root: files that the storage is tried with. None stays, whoever ends a trial."""

from __future__ import annotations

import os
from contextlib import suppress

from .store.base import Store
from .store.clock import MARGIN, store_time
from .store.local import LocalStore
from .store.paths import anything
from .sweep import Sweepable

TRIALS = "doctor"

STALE = 900.0
"""Seconds after which nobody needs a file any more. A first process waits 600 s for the second, and writes nothing."""


def sweep_trials(store: Store) -> None:
    """Delete what was left by a run that could not do so itself, and that is over for sure."""
    now = store_time(store, TRIALS)
    for entry in list(store.list(TRIALS)):
        if now - entry.modified > STALE + MARGIN:
            store.delete(entry.path)
    if isinstance(store, Sweepable):
        store.sweep(TRIALS, STALE + MARGIN, now=now, only=anything)


def drop_folder(store: Store) -> None:
    """A local store keeps its first level of folders; this one goes, unless another trial is under way in it."""
    if isinstance(store, LocalStore):
        with suppress(OSError):
            os.rmdir(os.path.join(store.url, TRIALS))
