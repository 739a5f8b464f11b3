"""What keeps a version from being collected, as files in the channel: leases, pins, and what readers serve.

A lease or a receipt says nothing any more when its file has not been written for a while, by the store's own clock;
a pin stays until it is taken away. One that cannot be read is an error, since nobody knows then what to keep.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from .canonical import canonical
from .channel import Channel
from .errors import BadManifest, NotFound, VersionGone
from .layout import COLLECTED, COLLECTOR, LEASES, PINS, RECEIPTS, collected_path, pin_path, version_of
from .store.base import Entry, Store, put_bytes, read_bytes
from .store.clock import StoreClock
from .version import VersionId, parse_label

READER_SECONDS = 3600.0
"""A reader that has not written its receipt for so long is taken for dead; a live one does every few minutes."""

FORGET_SECONDS = 7 * 86400.0
"""Leases and receipts that nobody has written for so long are deleted."""

MAX_RECORD = 1 << 20


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """`reader` is reading the version, and says so for `seconds` after the file was written."""

    reader: str
    epoch: int
    number: int
    since: float
    seconds: float = READER_SECONDS

    @property
    def version(self) -> VersionId:
        return VersionId(self.epoch, self.number)


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A person's wish to keep a version. `created` in seconds since 1970, by that person's clock."""

    epoch: int
    number: int
    why: str
    by: str
    created: float

    @property
    def version(self) -> VersionId:
        return VersionId(self.epoch, self.number)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to load `version`, in a reader's history. Durations in seconds; times since 1970."""

    version: str
    state: str
    at: float
    """When it ended, by the reader's clock."""

    created: float = 0.0
    """When the version was published, by the trainer's clock."""

    stage_seconds: float = 0.0
    pause_seconds: float = 0.0
    load_seconds: float = 0.0


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """A receipt as its reader wrote it last: what the engine serves, and how the last load went. Durations in
    seconds."""

    reader: str
    label: str = ""
    """Of the version that it serves; empty if none that is proven."""

    confirmed: str = ""
    """Of the last version that was proven, also when the engine has lost it since."""

    since: float = 0.0
    engine: str = ""
    follow: str = "latest"
    version: str = ""
    state: str = ""
    stage_seconds: float = 0.0
    pause_seconds: float = 0.0
    error: dict[str, str] | None = None
    history: tuple[Attempt, ...] = ()
    """Its last attempts, oldest first."""

    seen: float = 0.0
    """When it was written, in seconds since 1970 by the reader's clock."""

    silent: float = 0.0
    """How long ago the receipt was written, at least: to decide by."""

    heard: float = 0.0
    """The same as far as the clocks agree: to show."""

    @property
    def serves(self) -> VersionId | None:
        return parse_label(self.label)

    @property
    def confirmed_version(self) -> VersionId | None:
        return parse_label(self.confirmed or self.label)

    @property
    def alive(self) -> bool:
        return self.silent < READER_SECONDS


Record = TypeVar("Record", Lease, Pin, Reader)


def leases(store: Store, clock: StoreClock) -> list[Lease]:
    """Those that have not expired. BadManifest if one cannot be read."""
    found = _records(store, LEASES, Lease)
    return [lease for entry, lease in found if clock.age(entry.modified, lease.since) < lease.seconds]


def pins(store: Store) -> dict[VersionId, Pin | None]:
    """Every pin by its version, which its file's name says; None for what cannot be read otherwise."""
    named = {v: entry for entry in store.list(PINS) if (v := version_of(entry.path)) is not None}
    return {version: _pin(store, entry) for version, entry in sorted(named.items())}


def readers(store: Store, clock: StoreClock) -> list[Reader]:
    """Every receipt, also of readers that are long gone. BadManifest if one cannot be read."""
    found = _records(store, RECEIPTS, Reader)
    aged = (
        msgspec.structs.replace(
            reader,
            silent=max(0.0, clock.age(entry.modified, reader.seen)),
            heard=clock.estimate(entry.modified, reader.seen),
        )
        for entry, reader in found
    )
    return sorted(aged, key=lambda reader: reader.reader)


def held(store: Store, clock: StoreClock) -> dict[VersionId, str]:
    """What must stay on the word of others, and on whose."""
    found = {version: "pinned" + (f": {pin.why}" if pin else "") for version, pin in pins(store).items()}
    for lease in leases(store, clock):
        found.setdefault(lease.version, f"leased by {lease.reader}")
    for reader in readers(store, clock):
        if reader.confirmed_version is not None and reader.alive:
            found.setdefault(reader.confirmed_version, f"served by {reader.reader}")
    return found


def forget_dead(store: Store, clock: StoreClock) -> None:
    """Delete the leases and receipts of readers that are long gone, and what killed collectors left: each restart of
    one may leave some."""
    for folder in (LEASES, RECEIPTS, COLLECTOR):
        for entry in list(store.list(folder)):
            if clock.age(entry.modified) > FORGET_SECONDS:
                store.delete(entry.path)


def collected_versions(store: Store) -> Iterator[VersionId]:
    """Those of which a note says that they are being collected."""
    for entry in store.list(COLLECTED):
        if (version := version_of(entry.path)) is not None:
            yield version


def pin(channel: Channel, version: VersionId, why: str) -> None:
    """Keep the version until it is unpinned. VersionNotFound if it is not there, VersionGone if it is being collected.

    A pin that was there is replaced.
    """
    channel.manifest(version)
    record = Pin(epoch=version.epoch, number=version.number, why=why, by=_user(), created=time.time())
    put_bytes(channel.store, pin_path(version), canonical(msgspec.to_builtins(record)))
    try:
        check_not_collected(channel, version)
    except VersionGone:
        channel.store.delete(pin_path(version))
        raise


def unpin(channel: Channel, version: VersionId) -> None:
    """Take the pin away. NotFound if there is none."""
    if version not in pins(channel.store):
        raise NotFound(f"{version} is not pinned in {channel.store.url}")
    channel.store.delete(pin_path(version))


def check_not_collected(channel: Channel, version: VersionId) -> None:
    """VersionGone unless what was just written for it, a pin or a lease, came in time.

    The collector writes its note first and looks for pins and leases after that, so one of the two sees the other.
    """
    channel.check_still_there(version)
    try:
        channel.store.open(collected_path(version)).close()
    except NotFound:
        return
    raise VersionGone(
        f"{version} is being collected from {channel.store.url} at this moment (or was, when a collector died: let "
        "`ckptsync gc` finish first)"
    )


def _records(store: Store, folder: str, kind: type[Record]) -> Iterator[tuple[Entry, Record]]:
    for entry in store.list(folder):
        if not entry.path.endswith(".json"):
            continue
        try:
            yield entry, msgspec.json.decode(read_bytes(store, entry.path, MAX_RECORD), type=kind)
        except NotFound:
            continue  # taken back meanwhile
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadManifest(
                f"{store.url}/{entry.path} cannot be read ({error}): delete it if nobody needs it"
            ) from error


def _pin(store: Store, entry: Entry) -> Pin | None:
    try:
        return msgspec.json.decode(read_bytes(store, entry.path, MAX_RECORD), type=Pin)
    except (NotFound, BadManifest, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user often has no name
        return ""
