"""Whose the destination is, and the small records that a mirror copies: byte for byte, or not at all.

`mirror.json` says that a root is a mirror. A publisher refuses such a root, and a mirror refuses a channel without
it: so a root has one source of versions, and a mirror never mixes its own with another's.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from .. import epochs
from ..canonical import canonical
from ..channel import Channel
from ..committing import create_manifest
from ..errors import AlreadyExists, ChannelEmpty, NotAMirror, NotFound, StoreUnavailable, VersionExists
from ..layout import CHANNEL, MIRROR, claim_path
from ..manifest import Manifest
from ..store.base import Store, read_bytes

SMALL = 1 << 16


def take(source: Channel, target: Channel) -> None:
    """Make the destination a mirror of the source's channel, or find that it is one. Raises NotAMirror if it is
    something else, ChannelEmpty if nothing was ever published at the source."""
    if source.store.url == target.store.url:
        raise NotAMirror(f"{target.store.url} cannot be a mirror of itself")
    for inner, outer in ((source, target), (target, source)):
        if f"{inner.store.url}/".startswith(f"{outer.store.url.rstrip('/')}/"):
            raise NotAMirror(f"{inner.store.url} is inside {outer.store.url}: name a root of its own")
    channel_id, via = source.channel_id, upstream(source.store)
    if target.store.url in via:
        raise NotAMirror(
            f"{source.store.url} is itself mirrored from {target.store.url}, so nothing new would ever come to either: "
            "name the root that the trainer publishes to as the source"
        )
    if not read_bytes_or_empty(target.store, MIRROR):
        _check_free(target, channel_id)
        record = {"format": 1, "channel_id": channel_id, "source": source.store.url, "created": time.time()}
        said = {**record, "via": [*via, source.store.url]}
        create_same(target.store, MIRROR, canonical(said), same=False)
    try:
        found = target.channel_id
    except ChannelEmpty:
        create_same(target.store, CHANNEL, read_bytes(source.store, CHANNEL, SMALL))
        found = target.channel_id
    if found != channel_id:
        raise NotAMirror(
            f"{target.store.url} is a mirror of channel {found}, and {source.store.url} is channel {channel_id}: name "
            "another destination"
        )


def upstream(store: Store) -> list[str]:
    """Where a mirror's versions come from, the first source first; empty for a root that is none."""
    try:
        record = msgspec.json.decode(read_bytes(store, MIRROR, SMALL), type=dict[str, Any])
    except (NotFound, msgspec.DecodeError):
        return []
    return list(record.get("via") or [record.get("source", "")])  # releases before had no `via`


def _check_free(target: Channel, channel_id: str) -> None:
    try:
        found = target.channel_id
    except ChannelEmpty:
        if target.committed():
            raise NotAMirror(f"{target.store.url} holds versions but no {CHANNEL}: name an empty destination") from None
        others = (entry for entry in target.store.list("") if entry.path != MIRROR)
        if (other := next(others, None)) is not None:
            raise NotAMirror(f"{target.store.url} holds {other.path}: name an empty destination") from None
        return
    what = "another channel" if found != channel_id else "this channel, as its source or as a copy made by other means"
    raise NotAMirror(
        f"{target.store.url} holds {what}, and no {MIRROR}: nothing is mirrored there; name an empty destination"
    )


def copy_claims(source: Channel, target: Channel, known: set[int]) -> bool:
    """Every claim of the source that the destination lacks; whether there was any. `known` remembers those that are the
    same. NotAMirror if somebody claimed an epoch at the destination."""
    there = set(epochs.claimed(target.store))  # first: the source only gains some meanwhile
    claims = epochs.claimed(source.store)
    if alien := sorted(there - set(claims)):
        raise NotAMirror(
            f"{target.store.url} has epoch {alien[0]}, which {source.store.url} has not: somebody published there, or "
            "it was mirrored from a root that is ahead of this one; nothing is copied"
        )
    trusted = source.claims() if source.trust is not None else dict.fromkeys(claims, True)
    fresh = [number for number in claims if number not in known and trusted.get(number)]
    for number in fresh:
        create_same(target.store, claim_path(number), read_bytes(source.store, claim_path(number), SMALL))
        known.add(number)
    return bool(set(fresh) - there)


def commit(target: Channel, manifest: Manifest) -> None:
    """The version comes into being at the destination, as it was published. VersionExists if another one has its
    identity there."""
    found = create_manifest(target.store, manifest)
    if found.encoded != manifest.encoded:
        raise VersionExists(f"{target.store.url} has another {manifest.id}, by run {found.run_id}: nothing is replaced")
    target.refresh_head()


def create_same(store: Store, path: str, data: bytes, *, same: bool = True) -> None:
    """Create a small record, or find the same one there; NotAMirror for another one, unless any will do."""
    try:
        store.create(path, data)
    except (AlreadyExists, StoreUnavailable) as error:
        found = read_bytes_or_empty(store, path)
        if not found:
            raise
        if same and found != data:
            raise NotAMirror(
                f"{store.url}/{path} is not what it is at the source: the two have parted, since somebody published at "
                "the destination, or at a copy of the channel that one of them comes from; name an empty destination"
            ) from error


def read_bytes_or_empty(store: Store, path: str) -> bytes:
    try:
        return read_bytes(store, path, SMALL)
    except NotFound:
        return b""
