"""Which channel a root holds (`channel.json`, written once, by whoever publishes first), and whether it is a copy."""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import Any

import msgspec

from .errors import AlreadyExists, BadManifest, ChannelEmpty, IsMirror, NotFound, StoreUnavailable
from .layout import CHANNEL, MIRROR
from .manifest import FORMAT
from .store.base import Store, read_bytes


class ChannelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record as stored."""

    format: int
    channel_id: str
    created: float


def read_record(store: Store) -> ChannelRecord:
    """ChannelEmpty if there is none, BadManifest if it cannot be read."""
    try:
        data = read_bytes(store, CHANNEL, 1 << 16)
    except NotFound as error:
        raise ChannelEmpty(f"{store.url} is not a channel yet: nothing was ever published") from error
    try:
        record = msgspec.json.decode(data, type=ChannelRecord)
    except msgspec.DecodeError as error:
        raise BadManifest(f"{store.url}/{CHANNEL} is torn or not ours: {error}") from error
    if record.format != FORMAT:
        raise BadManifest(f"{store.url} is a channel of format {record.format}, this release reads {FORMAT}")
    return record


def check_there(store: Store) -> None:
    """StoreUnavailable for a root that held a channel before and holds none now. A mount that is away leaves an empty
    folder in its place, which says "not found" of everything: of versions, of claims, of what is pinned."""
    try:
        store.open(CHANNEL).close()
    except NotFound:
        raise StoreUnavailable(f"{store.url} holds no channel any more ({CHANNEL} is gone): is it mounted?") from None


def check_not_mirror(store: Store) -> None:
    """IsMirror if the root is a copy of another: a version of its own would part it from its source for ever."""
    try:
        store.open(MIRROR).close()
    except NotFound:
        return
    raise IsMirror(
        f"{store.url} is a mirror ({MIRROR} says of what): publish to its source, or, if that is lost for good, stop "
        f"mirroring and delete {MIRROR}"
    )


def mirrored_from(store: Store) -> str:
    """The root that this one is a copy of; empty if it is none."""
    try:
        record = msgspec.json.decode(read_bytes(store, MIRROR, 1 << 16), type=dict[str, Any])
    except (NotFound, msgspec.DecodeError):
        return ""
    return str(record.get("source", ""))


def copied_again(store: Store) -> str:
    """What mends a damaged mirror, as a command to type; empty for a root that is no mirror."""
    source = mirrored_from(store)
    return source and f"`ckptsync mirror {source} {store.url} --repair` copies it again"


def create_record(store: Store) -> ChannelRecord:
    """The one that is there afterwards: ours, or that of a trainer that came first."""
    record = ChannelRecord(format=FORMAT, channel_id=uuid.uuid4().hex, created=time.time())
    # Another trainer's, or our own with a lost answer: the file says.
    with contextlib.suppress(AlreadyExists, StoreUnavailable):
        store.create(CHANNEL, msgspec.json.encode(record))
    return read_record(store)
