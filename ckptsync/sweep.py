"""Sweeping what dead trainer attempts left in `data/`: folders that no manifest names, and files in the making.

Only the holder of a newer epoch sweeps, and only what is of older ones, which can commit nothing any more. Time
is for the grace period alone, and only the store's own: the age of a file is told against a file that is written
now, so no clock of ours has a say, and no time, however wrong, makes a committed version debris.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from .channel import Channel
from .epochs import Epoch
from .errors import CkptSyncError, Corrupt, NotFound, StoreDenied
from .layout import DATA
from .store.base import Entry, Store, put_bytes
from .store.paths import Only
from .version import VersionId, parse_stem

log = logging.getLogger(__name__)

MARGIN = 60.0
"""Seconds added to the grace time, for servers of one store whose clocks differ."""

_ATTEMPT = re.compile(r"(e\d{4,9}-v\d{8,18})-([^/]+)", re.ASCII)


class Swept(NamedTuple):
    """What a sweep deleted: complete files and their bytes, and files or uploads that were never completed."""

    files: int
    nbytes: int
    unfinished: int


@runtime_checkable
class _Sweepable(Protocol):
    def sweep(self, folder: str, grace: float, *, now: float | None, only: Only) -> int: ...


def sweep_debris(channel: Channel, epoch: Epoch, *, grace: float = 3600.0) -> Swept:
    """Delete what attempts of epochs older than `epoch` left behind and nobody touched for `grace` seconds.

    A folder goes if no committed manifest has its identity and nonce. One whose manifest cannot be read stays, and
    so do live attempts: those of `epoch` and of newer ones. What cannot be deleted is left for the next sweep, with
    one warning. Raises StoreError if the store cannot be listed; nothing is deleted then.
    """
    store = channel.store
    debris = _uncommitted(channel, epoch, _old_folders(store, epoch))
    now = _store_time(store)
    unfinished = _sweep_unfinished(store, epoch, grace + MARGIN, now)
    stale = [files for files in debris.values() if now - max(file.modified for file in files) > grace + MARGIN]
    files, nbytes = _delete(store, [file for files in stale for file in files])
    return Swept(files, nbytes, unfinished)


def _old_folders(store: Store, epoch: Epoch) -> dict[str, list[Entry]]:
    """`data/<stem>-<nonce>` of older epochs -> its files. What is not named like an attempt is not ours to judge."""
    folders: dict[str, list[Entry]] = {}
    for entry in store.list(DATA):
        if _is_older(entry.path, epoch):
            folders.setdefault("/".join(entry.path.split("/")[:2]), []).append(entry)
    return folders


def _is_older(path: str, epoch: Epoch) -> bool:
    version = _version_of(path)
    return version is not None and version.epoch < epoch.number


def _version_of(path: str) -> VersionId | None:
    """The version that the file `data/<stem>-<nonce>/...`, or that folder, was written for."""
    match = _ATTEMPT.fullmatch(path.split("/")[1])
    return parse_stem(match[1]) if match else None


def _uncommitted(channel: Channel, epoch: Epoch, folders: Mapping[str, list[Entry]]) -> dict[str, list[Entry]]:
    """Those that no manifest names. Manifests are listed after the data, so none came in between."""
    committed = set(channel.committed())
    if epoch.resumed_from is not None and epoch.resumed_from not in committed:
        log.warning("nothing is swept: %s, which this run resumed from, has no manifest any more", epoch.resumed_from)
        return {}
    attempts = Counter(_version_of(folder) for folder in folders)
    return {
        folder: files
        for folder, files in folders.items()
        if (version := _version_of(folder)) not in committed
        or (attempts[version] > 1 and not _is_named(channel, folder, version))
    }


def _is_named(channel: Channel, folder: str, version: VersionId) -> bool:
    """Asked only where a version has several folders: reading every manifest would make a start-up slow."""
    try:
        return channel.manifest(version).folder == folder
    except (Corrupt, NotFound, StoreDenied) as error:
        log.warning("%s stays: the manifest of %s cannot be read: %s", folder, version, error)
        return True


def _store_time(store: Store) -> float:
    """What time it is for the store, in seconds: that of a file written now."""
    folder = f"{DATA}/probe-{uuid.uuid4().hex}"
    put_bytes(store, f"{folder}/now", b"now")
    try:
        return max((entry.modified for entry in store.list(folder)), default=0.0)
    finally:
        store.delete(f"{folder}/now")


def _sweep_unfinished(store: Store, epoch: Epoch, grace: float, now: float) -> int:
    """Temporary files and uploads, where the store can tell its own."""
    if not isinstance(store, _Sweepable):
        return 0
    try:
        return store.sweep(DATA, grace, now=now, only=lambda path: _is_older(path, epoch))
    except CkptSyncError as error:
        log.warning("unfinished files of dead attempts stay: %s", error)
        return 0


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
        log.warning("%d files of dead attempts could not be deleted and stay; the first: %s", len(failed), failed[0])
    return len(deleted), sum(entry.size for entry in deleted)
