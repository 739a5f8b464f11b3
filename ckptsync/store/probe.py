"""What is asked of a storage at start-up: is it there, and does it really enforce create-if-absent?"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

from ..errors import AlreadyExists, CkptSyncError, InvalidInput, NotFound
from .base import Store
from .local import LocalStore
from .retry import translated


def is_there(store: Store) -> bool:
    """Whether the root can hold versions now. An object store has no folders: there always. InvalidInput for a file."""
    if not isinstance(store, LocalStore):
        return True
    path = store.url
    try:
        found = translated(f"look at {path}", lambda: os.path.isdir(path) or os.stat(path))
    except NotFound:
        return False
    if found is not True:
        raise InvalidInput(f"{path} is not a folder")
    return True


def enforces_create(store: Store) -> bool:
    """Create one probe name twice and delete it: True if the second was refused.

    Catches servers that ignore the condition (some S3 clones overwrite and answer 200). It cannot catch a
    mount on which two *machines* both win a race (measured on FUSE): two writers there are detected, not
    prevented.
    """
    path = f"probe-{secrets.token_hex(16)}"
    with deleted_after(store, path):
        return _refused(store, path, b"first") or _refused(store, path, b"second")


@contextlib.contextmanager
def deleted_after(store: Store, path: str) -> Iterator[None]:
    """Delete the file at the end. If the body raises, its error is the one to see: on a store that may not be written
    (EROFS) the delete fails as well.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(CkptSyncError):
            store.delete(path)
        raise
    store.delete(path)


def _refused(store: Store, path: str, data: bytes) -> bool:
    """The first can be refused as well, if its answer was lost and the retry met its own file: also a yes."""
    try:
        store.create(path, data)
    except AlreadyExists:
        return True
    return False
