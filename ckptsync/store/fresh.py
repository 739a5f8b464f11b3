"""A folder that is filled, or leaves no trace of the attempt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .. import logs
from ..errors import CkptSyncError, InvalidInput
from .local import LocalStore

log = logs.get(__name__)


@contextmanager
def fresh_folder(folder: str, *, whole: str) -> Iterator[LocalStore]:
    """A new or empty local folder as a store. If the body raises, what is in it goes again, and so do the folders that
    were made for it; what cannot be deleted is named in a warning.

    InvalidInput if it is none, or holds something; `whole` is the file without which that may be a dead attempt.
    """
    folder = _checked(folder, whole)
    made = list(_absent(folder))
    store = LocalStore(folder)
    try:
        yield store
    except BaseException:
        _empty(store)
        for each in made:
            with suppress(OSError):
                os.rmdir(each)
        raise


def _checked(folder: str, whole: str) -> str:
    if "://" in folder:
        raise InvalidInput(f"{folder} is no local folder")
    there = os.path.abspath(folder)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise InvalidInput(f"{there} is not a folder")
    if os.path.isdir(folder) and os.listdir(folder):
        dead = f" (or delete this one: without {whole} it is no whole export)"
        raise InvalidInput(
            f"{folder} is not empty: name a new folder{'' if os.path.exists(os.path.join(folder, whole)) else dead}"
        )
    return os.path.abspath(folder)


def _absent(folder: str) -> Iterator[str]:
    """The folder and those above it that are not there yet, the innermost first."""
    while not os.path.exists(folder):
        yield folder
        folder = os.path.dirname(folder)


def _empty(store: LocalStore) -> None:
    try:
        for entry in list(store.list()):
            store.delete(entry.path)
    except CkptSyncError as error:
        log.warning("%s holds an unfinished copy: %s", store.url, error, extra={"event": "left-behind"})
