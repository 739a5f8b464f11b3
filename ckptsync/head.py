"""`head.json`: a hint at the newest version, which saves readers a listing. The listing is the truth."""

from __future__ import annotations

import msgspec

from . import logs
from .errors import Corrupt, NotFound, StoreError
from .layout import HEAD
from .manifest import Manifest
from .store.base import Store, put_bytes, read_bytes

log = logs.get(__name__)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """`head.json`: a hint at the newest version, overwritten; a torn one is told by not parsing and is ignored."""

    epoch: int
    number: int
    manifest_digest: str
    length: int
    claimed: int
    """The newest epoch claimed, so that a resume to an earlier version wakes readers before its first publish."""


def read_head(store: Store) -> bytes | None:
    """What is there, to be compared with what was there before."""
    try:
        return read_bytes(store, HEAD, 1 << 16)
    except (NotFound, Corrupt):
        return None


def write_head(store: Store, manifest: Manifest, claimed: int) -> None:
    """Best effort: readers find the version by listing, too."""
    head = Head(
        epoch=manifest.epoch,
        number=manifest.number,
        manifest_digest=manifest.manifest_digest,
        length=len(manifest.encoded),
        claimed=claimed,
    )
    try:
        put_bytes(store, HEAD, msgspec.json.encode(head))
    except StoreError as error:
        log.warning(
            "%s was not updated (%s); readers find %s by listing",
            HEAD,
            error,
            manifest.id,
            extra=logs.about(manifest.id, event="head-not-updated"),
        )
