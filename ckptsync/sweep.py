"""Sweeping what dead writers left in `data/`: folders that no manifest names, and files in the making.

A file in the making for a version that is complete is of use to nobody: trainers, mirrors and `gc` take it away. Of the
rest only the holder of a newer epoch sweeps, and only what is of older ones, which can commit nothing any more. Time
is for the grace period alone, and only the store's own: the age of a file is told against a file that is written
now, so no clock of ours has a say, and no time, however wrong, makes a committed version debris.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from . import logs
from .channel import Channel
from .channel_record import check_there
from .epochs import Epoch
from .errors import CkptSyncError, Corrupt, NotFound, StoreDenied
from .holds import collected_versions
from .layout import COLLECTOR, DATA
from .replaced import replaced_manifests
from .store.base import Entry, Store
from .store.clock import MARGIN, store_time
from .store.paths import Only
from .version import VersionId, parse_stem

log = logs.get(__name__)

_ATTEMPT = re.compile(r"(e\d{4,9}-v\d{8,18})-([^/]+)", re.ASCII)


class Swept(NamedTuple):
    """What a sweep deleted: complete files and their bytes, and files or uploads that were never completed."""

    files: int
    nbytes: int
    unfinished: int


@runtime_checkable
class Sweepable(Protocol):
    """A store that can tell its own unfinished files and uploads from others."""

    def sweep(self, folder: str, grace: float, *, now: float | None, only: Only) -> int: ...


@runtime_checkable
class Unfinished(Protocol):
    """A store that can list them."""

    def unfinished(self, folder: str) -> Iterator[Entry]: ...


def sweep_debris(channel: Channel, epoch: Epoch, *, grace: float = 3600.0) -> Swept:
    """Delete what attempts of epochs older than `epoch` left behind and nobody touched for `grace` seconds.

    A folder goes if no committed manifest has its identity and nonce. One whose manifest cannot be read stays, and
    so do live attempts: those of `epoch` and of newer ones. What cannot be deleted is left for the next sweep, with
    one warning. Raises StoreError if the store cannot be listed; nothing is deleted then.
    """
    store = channel.store
    debris = _uncommitted(channel, _folders(store, lambda path: _is_older(path, epoch)), epoch.resumed_from)
    check_there(store)  # after the listings: those of manifests are empty where a mount went away, and all is debris
    now, is_over = store_time(store, DATA), _of_complete(channel)
    unfinished = _sweep_unfinished(store, lambda path: is_over(path) or _is_older(path, epoch), grace + MARGIN, now)
    files, nbytes = _delete_stale(store, debris, now, grace)
    return Swept(files, nbytes, unfinished)


def sweep_unmirrored(channel: Channel, source: Collection[VersionId], *, grace: float = 3600.0) -> Swept:
    """The same for a mirror: what is not committed there and will not be, since it is not in `source` any more."""
    store, is_over = channel.store, _of_complete(channel)
    debris = {
        folder: files for folder, files in unfinished_attempts(channel).items() if _version_of(folder) not in source
    }
    check_there(store)
    now = store_time(store, DATA)
    unfinished = _sweep_unfinished(
        store, lambda path: is_over(path) or _version_of(path) not in source, grace + MARGIN, now
    )
    files, nbytes = _delete_stale(store, debris, now, grace)
    return Swept(files, nbytes, unfinished)


def sweep_leftovers(channel: Channel, *, grace: float = 3600.0) -> int:
    """Delete files in the making, for versions that are complete, that nobody touched for `grace` seconds; the number
    of them. Raises StoreError if the store cannot be listed."""
    return _sweep_unfinished(channel.store, _of_complete(channel), grace + MARGIN, store_time(channel.store, COLLECTOR))


def unfinished_attempts(channel: Channel) -> dict[str, list[Entry]]:
    """`data/<stem>-<nonce>` -> its files, for every attempt that no manifest names: dead ones, and those that run."""
    return _uncommitted(channel, _folders(channel.store, lambda path: _version_of(path) is not None))


def leftovers(channel: Channel) -> dict[str, int]:
    """Folder -> bytes that are there of what is not complete: of attempts that no manifest names, and of files in the
    making, where the store can tell its own. Of writers that run, and of dead ones."""
    found = {folder: sum(file.size for file in files) for folder, files in unfinished_attempts(channel).items()}
    for entry in channel.store.unfinished(DATA) if isinstance(channel.store, Unfinished) else ():
        folder = "/".join(entry.path.split("/")[:2])
        found[folder] = found.get(folder, 0) + entry.size
    return dict(sorted(found.items()))


def _of_complete(channel: Channel) -> Only:
    """Whether a file in the making is for a version that is there without it."""
    committed = set(channel.committed())
    return lambda path: _version_of(path) in committed


def _folders(store: Store, only: Only) -> dict[str, list[Entry]]:
    """`data/<stem>-<nonce>` -> its files. What is not named like an attempt is not ours to judge."""
    folders: dict[str, list[Entry]] = {}
    for entry in store.list(DATA):
        if only(entry.path):
            folders.setdefault("/".join(entry.path.split("/")[:2]), []).append(entry)
    return folders


def _is_older(path: str, epoch: Epoch) -> bool:
    version = _version_of(path)
    return version is not None and version.epoch < epoch.number


def _version_of(path: str) -> VersionId | None:
    """The version that the file `data/<stem>-<nonce>/...`, or that folder, was written for."""
    match = _ATTEMPT.fullmatch(path.split("/")[1])
    return parse_stem(match[1]) if match else None


def _uncommitted(
    channel: Channel, folders: Mapping[str, list[Entry]], resumed_from: VersionId | None = None
) -> dict[str, list[Entry]]:
    """Those that no manifest names. Manifests are listed after the data, so none came in between."""
    committed = {*channel.committed(), *replaced_manifests(channel.store)}
    # After the manifests: a version is noted before its manifest goes, and what is noted is the collector's.
    collected = set(collected_versions(channel.store))
    if resumed_from is not None and resumed_from not in committed:
        log.warning(
            "nothing is swept: %s, which this run resumed from, has no manifest any more",
            resumed_from,
            extra={"event": "not-swept"},
        )
        return {}
    attempts = Counter(_version_of(folder) for folder in folders)
    return {
        folder: files
        for folder, files in folders.items()
        if _version_of(folder) not in collected
        if (version := _version_of(folder)) not in committed
        or (attempts[version] > 1 and not _is_named(channel, folder, version))
    }


def _is_named(channel: Channel, folder: str, version: VersionId) -> bool:
    """Asked only where a version has several folders: reading every manifest would make a start-up slow."""
    try:
        return channel.manifest(version).folder == folder
    except (Corrupt, NotFound, StoreDenied) as error:
        log.warning(
            "%s stays: the manifest of %s cannot be read: %s",
            folder,
            version,
            error,
            extra=logs.about(version, event="not-swept"),
        )
        return True


def _sweep_unfinished(store: Store, only: Only, grace: float, now: float) -> int:
    """Temporary files and uploads, where the store can tell its own."""
    if not isinstance(store, Sweepable):
        return 0
    try:
        return store.sweep(DATA, grace, now=now, only=only)
    except CkptSyncError as error:
        log.warning("unfinished files of dead attempts stay: %s", error, extra={"event": "not-swept"})
        return 0


def _delete_stale(store: Store, debris: Mapping[str, list[Entry]], now: float, grace: float) -> tuple[int, int]:
    stale = [files for files in debris.values() if now - max(file.modified for file in files) > grace + MARGIN]
    return _delete(store, [file for files in stale for file in files])


def _delete(store: Store, entries: list[Entry]) -> tuple[int, int]:
    """Number and bytes of the files that could be deleted."""
    deleted: list[Entry] = []
    failed: list[CkptSyncError] = []
    for entry in entries:
        try:
            store.delete(entry.path)
            deleted.append(entry)
        except CkptSyncError as error:
            failed.append(error)
    if failed:
        log.warning(
            "%d files of dead attempts could not be deleted and stay; the first: %s",
            len(failed),
            failed[0],
            extra={"event": "not-swept"},
        )
    return len(deleted), sum(entry.size for entry in deleted)
