"""Does this storage really enforce create-if-absent? Asked once at start-up, by doing it twice."""

from __future__ import annotations

import secrets

from ..errors import AlreadyExists
from .base import Store


def enforces_create(store: Store) -> bool:
    """Create one probe name twice and delete it: True if the second was refused.

    Catches servers that ignore the condition (some S3 clones overwrite and answer 200). It cannot catch a
    mount on which two *machines* both win a race (measured on FUSE): two writers there are detected, not
    prevented.
    """
    path = f"probe-{secrets.token_hex(16)}"
    try:
        return _refused(store, path, b"first") or _refused(store, path, b"second")
    finally:
        store.delete(path)


def _refused(store: Store, path: str, data: bytes) -> bool:
    """The first can be refused as well, if its answer was lost and the retry met its own file: also a yes."""
    try:
        store.create(path, data)
    except AlreadyExists:
        return True
    return False
