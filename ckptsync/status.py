"""What is in a channel and who serves it: everything that `ckptsync status` shows, as plain data.

Only reads. Ages are by this machine's clock, and so is how long a reader is behind: to look at, not to act on.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from . import holds
from .absent import why_none
from .channel import Channel
from .errors import Corrupt, VersionNotFound
from .holds import Attempt, Lease, Pin, Reader, collected_versions
from .layout import DATA
from .manifest import Manifest, Origin
from .replaced import replaced_manifests
from .store.clock import StoreClock
from .sweep import leftovers
from .version import VersionId

Record = TypeVar("Record", Lease, Reader)


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One version. Bytes: `nbytes` as an engine loads it, `stored` in its own folder, trainer state included."""

    version: str
    live: bool = False
    problem: str = ""
    """Why it is not complete; then nothing below is known."""

    kind: str = ""
    step: int | None = None
    created: float = 0.0
    nbytes: int = 0
    stored: int = 0
    folder: str = ""
    parent: str | None = None
    data_of: str | None = None
    """Whose data folder it shares; `folder` is empty then."""

    pinned: str | None = None
    """Why, if it is."""

    serving: tuple[str, ...] = ()
    """Readers that serve it now."""


class EpochStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer attempt; the fields are empty where its claim cannot be read."""

    epoch: int
    resumed_from: str | None = None
    run_id: str = ""
    host: str = ""
    created: float = 0.0
    why_none: str = ""
    """Why none of its versions is there, if so: `none yet`; `not kept`, of one that did publish; `none, or not kept`,
    of an older one of which nothing tells whether it did."""


class ReaderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One reader. Durations in seconds."""

    reader: str
    engine: str
    serves: str
    since: float
    follow: str
    lag: int
    """How many live versions are newer than the one that it serves; all if it serves none."""

    behind: float
    """How long ago the first of them was published; 0 if there is none."""

    alive: bool
    silent: float
    """How long ago it was heard, as far as the clocks agree."""

    stage_seconds: float
    pause_seconds: float
    state: str
    """How the last attempt went, and `version` is what was tried; `error` is empty if all is well."""

    version: str
    error: str
    history: tuple[Attempt, ...] = ()
    """Its last attempts, oldest first."""


class ChannelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a channel. Versions and epochs ascending."""

    root: str
    at: float
    newest: str | None
    versions: tuple[VersionStatus, ...]
    epochs: tuple[EpochStatus, ...]
    readers: tuple[ReaderStatus, ...]
    leases: tuple[Lease, ...]
    debris: dict[str, int]
    """Folder -> bytes, of attempts that no manifest names, and of files in the making: of a publish or a mirror that
    runs, or of one that died."""

    waiting: dict[str, int]
    """Version -> bytes, of versions that were collected and whose data are there still."""

    disk: int
    """Bytes of everything below the root."""

    problems: tuple[str, ...]
    """What cannot be read of leases and receipts: retention deletes nothing until it is gone."""


class Observer:
    """Looks at one channel again and again; each manifest is read once."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._known: dict[VersionId, VersionStatus] = {}

    def look(self) -> ChannelStatus:
        """Raises StoreError. What cannot be read besides is said in the answer."""
        store, clock, problems = self.channel.store, StoreClock.guess(), list[str]()
        committed, live, sizes = self.channel.committed(), set(self.channel.versions()), self._sizes()
        readers = _readable(lambda: holds.readers(store, clock), problems)
        leases = _readable(lambda: holds.leases(store, clock), problems)
        versions = {version: self._version(version) for version in committed}
        for version, problem in replaced_manifests(store).items():
            versions[version] = VersionStatus(version=version.label, problem=problem)
        self._known = {version: found for version, found in versions.items() if version in self._known}
        complete = [version for version in committed if version in live and not versions[version].problem]
        pins = holds.pins(store)
        serving: dict[str, list[str]] = {}
        for reader in readers:
            if reader.alive:
                serving.setdefault(reader.label, []).append(reader.reader)
        noted = set(collected_versions(store))
        return ChannelStatus(
            root=store.url,
            at=time.time(),
            newest=complete[-1].label if complete else None,
            versions=tuple(
                msgspec.structs.replace(
                    found,
                    live=version in live,
                    stored=sizes.get(found.folder, 0),
                    pinned=_why(pins.get(version), version in pins),
                    serving=tuple(serving.get(version.label, ())),
                )
                for version, found in sorted(versions.items())
            ),
            epochs=tuple(self._epochs(committed, noted)),
            readers=tuple(_reader(reader, complete, versions) for reader in readers),
            leases=tuple(leases),
            debris=leftovers(self.channel),
            waiting=_stored(noted - set(committed), sizes),
            disk=sum(sizes.values()),
            problems=tuple(problems),
        )

    def _sizes(self) -> dict[str, int]:
        """Bytes by data folder, and by folder or file for all else at the root."""
        sizes: dict[str, int] = {}
        for entry in self.channel.store.list(""):
            parts = entry.path.split("/")
            top = "/".join(parts[:2]) if parts[0] == DATA else parts[0]
            sizes[top] = sizes.get(top, 0) + entry.size
        return sizes

    def _version(self, version: VersionId) -> VersionStatus:
        if version in self._known:
            return self._known[version]
        try:
            found = _facts(self.channel.manifest(version))
        except (Corrupt, VersionNotFound) as error:
            return VersionStatus(version=version.label, problem=str(error))
        self._known[version] = found
        return found

    def _epochs(self, committed: Collection[VersionId], noted: Collection[VersionId]) -> Iterator[EpochStatus]:
        """Every attempt, also one without a version."""
        claims = {**dict.fromkeys(version.epoch for version in committed), **self.channel.claims()}
        why = why_none(claims, committed, noted)
        for number, claim in sorted(claims.items()):
            if claim is None:
                yield EpochStatus(epoch=number, why_none=why.get(number, ""))
                continue
            came_from = claim.resumed_from.label if claim.resumed_from is not None else None
            yield EpochStatus(epoch=number, resumed_from=came_from, run_id=claim.run_id, host=claim.host,
                              created=claim.created, why_none=why.get(number, ""))  # fmt: skip


def _facts(manifest: Manifest) -> VersionStatus:
    parent, origin = manifest.parent, manifest.data_of
    return VersionStatus(
        version=manifest.id.label,
        kind=manifest.kind,
        step=manifest.step,
        created=manifest.created,
        nbytes=manifest.nbytes,
        folder="" if isinstance(origin, Origin) else manifest.folder,
        parent=VersionId(parent.epoch, parent.number).label if parent is not None else None,
        data_of=origin.id.label if isinstance(origin, Origin) else None,
    )


def _reader(reader: Reader, complete: Sequence[VersionId], versions: Mapping[VersionId, VersionStatus]) -> ReaderStatus:
    first = bisect_right(complete, reader.serves) if reader.serves else 0
    return ReaderStatus(
        reader=reader.reader,
        engine=reader.engine,
        serves=reader.label,
        since=reader.since,
        follow=reader.follow,
        lag=len(complete) - first,
        behind=max(0.0, time.time() - versions[complete[first]].created) if first < len(complete) else 0.0,
        alive=reader.alive,
        silent=reader.heard,
        stage_seconds=reader.stage_seconds,
        pause_seconds=reader.pause_seconds,
        state=reader.state,
        version=reader.version,
        error=(reader.error or {}).get("message", ""),
        history=reader.history,
    )


def _why(pin: Pin | None, pinned: bool) -> str | None:
    if pin is not None:
        return pin.why
    return "" if pinned else None


def _stored(versions: Iterable[VersionId], sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes by version, ascending, of all its folders: an attempt has one each."""
    stems = {version.stem: version.label for version in sorted(versions)}
    found = dict.fromkeys(stems.values(), 0)
    for folder, size in sizes.items():
        stem = "-".join(folder.removeprefix(f"{DATA}/").split("-", 2)[:2])
        if stem in stems:
            found[stems[stem]] += size
    return found


def _readable(read: Callable[[], list[Record]], problems: list[str]) -> list[Record]:
    try:
        return read()
    except Corrupt as error:
        problems.append(str(error))
        return []
