"""A cache of verified versions on this host, on a local disk or in memory (/dev/shm).

    <stage>/<channel id>/<version>-<nonce>/            the listed files; ckptsync.json once all are verified
    <stage>/<channel id>/.<version>-<nonce>.journal    which files are verified; survives a kill
                                        ....filling    held alone while the store is read
                                        ....use        held shared by whoever serves or loads the version

Any number of engines on the host share it: one reads the store, the others wait and find the version
complete. Folders are made private (0700): an engine that runs as another user needs its own stage.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import msgspec

from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from ckptsync.errors import BadShard, CkptSyncError, NotFound, StoreDenied, StoreFull
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import FileEntry, Manifest, Track, canonical, check_basename
from ckptsync.shards.read import check_header, read_header
from ckptsync.version import VersionId, parse_stem

from . import locks
from .fetch import DeniedFile, Download, fetch, local_error
from .journal import Journal
from .proof import check_index

log = logging.getLogger(__name__)

LEASE_SECONDS = 600.0

Progress = Callable[[int], None]


class MissingFile(BadShard):
    """A file that the manifest lists is not on the store: not copied there yet, or lost."""


class NotAFile(BadShard):
    """Something that is not followed is in a file's place, such as a symbolic link."""


class Stage:
    """The versions of any number of channels under one local folder, which is made if need be.

    A version stays while a process of this host uses it, and the `keep` newest stay besides.
    """

    def __init__(self, folder: str, *, keep: int = 2) -> None:
        self.folder = os.path.abspath(folder)
        self.keep = keep
        self._in_use: dict[str, int] = {}
        self._lease_failed = False

    def stage(
        self,
        channel: Channel,
        manifest: Manifest,
        progress: Progress | None = None,
        *,
        reader: str | None = None,
    ) -> StagedVersion:
        """The version, complete and verified on this host, and held until `release`; the store is read if
        need be.

        `progress` is told of bytes as they come in; a version that is here already moves none. `reader`
        names the lease that keeps the version from being collected while it is read; None takes no lease.

        Raises BadShard (MissingFile, NotAFile) for bytes that are absent or wrong, VersionGone if it was
        collected meanwhile, StoreFull before any byte is read if the stage has no room, DeniedFile if the
        store is readable and this version's file is not, StoreError for other failures of either storage.
        Concurrent readers never see an unverified file in a folder that has its `ckptsync.json`.
        """
        slot = _Slot(self._private(manifest.channel_id), manifest)
        self._hold(slot)
        try:
            if not slot.is_complete():
                with locks.exclusive(slot.path(".filling")):
                    if not slot.is_complete():
                        self._fill(slot, channel, progress or (lambda _: None), reader)
        except BaseException:
            self._let_go(slot.folder)
            raise
        return StagedVersion(manifest=manifest, folder=slot.folder)

    def find(self, manifest: Manifest) -> StagedVersion | None:
        """The version if it is here already, held as by `stage`; the store is not read."""
        slot = _Slot(self._private(manifest.channel_id), manifest)
        if not slot.is_complete():
            return None
        self._hold(slot)
        if slot.is_complete():
            return StagedVersion(manifest=manifest, folder=slot.folder)
        self._let_go(slot.folder)
        return None

    def release(self, version: StagedVersion) -> None:
        """This process no longer needs the version; it may be evicted."""
        self._let_go(version.folder)

    def close(self) -> None:
        """Release everything. The kernel does the same when the process dies."""
        for folder in list(self._in_use):
            self._let_go(folder)

    def evict(self, channel_id: str, keep: int) -> None:
        """Remove versions of a channel that nobody on this host uses, save the `keep` newest."""
        base = self._private(channel_id)
        found = sorted((v, name) for name in os.listdir(base) if (v := _version_of(name)) is not None)
        for _, name in found[: max(0, len(found) - keep)]:
            _remove_unused(base, name)

    # -- inside ------------------------------------------------------------------------------------------

    def _fill(self, slot: _Slot, channel: Channel, progress: Progress, reader: str | None) -> None:
        self.evict(slot.manifest.channel_id, self.keep - 1)
        with self._lease(channel, slot.manifest.id, reader) as renew:

            def moved(count: int) -> None:
                renew()
                progress(count)

            slot.make_folders()
            wanted = [download for download in slot.downloads() if not slot.has(download)]
            slot.check_room(sum(download.entry.size for download in wanted))
            try:
                with closing(fetch(channel.store, wanted, moved)) as arriving:
                    for download in arriving:
                        slot.keep(download)
            except NotFound as error:
                channel.check_still_there(slot.manifest.id)
                raise MissingFile(
                    f"a file of {slot.manifest.id} is in its manifest and not on the store: {error}"
                ) from error
            except DeniedFile as error:
                _check_denied(channel, slot.manifest, error)
                raise
            slot.seal()

    @contextmanager
    def _lease(self, channel: Channel, version: VersionId, reader: str | None) -> Iterator[Callable[[], None]]:
        renewed = float("-inf")

        def renew() -> None:
            nonlocal renewed
            if reader is not None and time.monotonic() - renewed > LEASE_SECONDS / 3:
                renewed = time.monotonic()
                self._advise(lambda: channel.lease(reader, version, LEASE_SECONDS))

        renew()
        try:
            yield renew
        finally:
            if reader is not None:
                self._advise(lambda: channel.release(reader))

    def _advise(self, write: Callable[[], None]) -> None:
        """Leases are advisory: a reader of a read-only store works without."""
        if self._lease_failed:
            return
        try:
            write()
        except CkptSyncError as error:  # also a bucket that is gone, or a name that is contended
            self._lease_failed = True
            log.warning("no lease can be written (%s): the publisher's retention does not know of this reader", error)

    def _private(self, channel_id: str) -> str:
        base = os.path.join(self.folder, check_basename(channel_id, "channel"))
        try:
            os.makedirs(base, mode=0o700, exist_ok=True)
        except OSError as error:
            raise local_error(error, base) from error
        found = os.lstat(base)
        # /dev/shm and /tmp are everybody's: never follow what another user put there under our name.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise StoreDenied(f"{base} is not a folder of ours: choose another stage")
        return base

    def _hold(self, slot: _Slot) -> None:
        if slot.folder not in self._in_use:
            handle = locks.acquire(slot.path(".use"), exclusive=False)
            if handle is not None:
                self._in_use[slot.folder] = handle

    def _let_go(self, folder: str) -> None:
        handle = self._in_use.pop(folder, None)
        if handle is not None:
            os.close(handle)


class _Slot:
    """One version's place in the stage."""

    def __init__(self, base: str, manifest: Manifest) -> None:
        self.base, self.manifest = base, manifest
        self.name = f"{manifest.id.stem}-{manifest.nonce}"
        self.folder = os.path.join(base, self.name)
        self.journal = Journal(self.path(".journal"))

    def path(self, suffix: str) -> str:
        return os.path.join(self.base, f".{self.name}{suffix}")

    def downloads(self) -> Iterator[Download]:
        """The target carries `.part` until it is verified."""
        for relative, entry in self.manifest.files():
            yield Download(
                source=f"{self.manifest.folder}/{relative}",
                target=os.path.join(self.folder, relative) + ".part",
                entry=entry,
                algorithm=self.manifest.digest,
            )

    def make_folders(self) -> None:
        for download in self.downloads():
            os.makedirs(os.path.dirname(download.target), mode=0o700, exist_ok=True)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)

    def check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise StoreFull(f"the stage {self.base} has {free} bytes free, {self.manifest.id} needs {needed}")

    def is_complete(self) -> bool:
        try:
            with open(os.path.join(self.folder, SELF_COPY), "rb") as file:
                sealed = file.read()
        except FileNotFoundError:
            return False
        return sealed == _sealed(self.manifest) and all(
            self.journal.vouches(_final(download), download.entry) for download in self.downloads()
        )

    def has(self, download: Download) -> bool:
        """Is this file here and verified? After a reboot the journal is not believed, and the file is read
        again."""
        path = _final(download)
        if self.journal.vouches(path, download.entry):
            return True
        if not self.journal.rereads(path, download.entry, download.algorithm):
            return False
        self.journal.add(path, download.entry)
        return True

    def keep(self, download: Download) -> None:
        """Bytes are right; now the content: header against manifest, index against both."""
        try:
            _check_content(download.target, download.entry, self._track_of(download.entry))
        except BadShard:
            os.unlink(download.target)
            raise
        os.rename(download.target, _final(download))
        self.journal.add(_final(download), download.entry)

    def _track_of(self, entry: FileEntry) -> Track:
        return next(track for track in self.manifest.tracks.values() if any(f is entry for f in track.files))

    def seal(self) -> None:
        """Remove what is not listed, such as a killed attempt's leftovers, then say that all is here."""
        listed = {_final(download) for download in self.downloads()}
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if os.path.join(folder, name) not in listed:
                    os.unlink(os.path.join(folder, name))
        path = os.path.join(self.folder, SELF_COPY)
        with open(os.open(path + ".part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_sealed(self.manifest))
        os.rename(path + ".part", path)


def _final(download: Download) -> str:
    return download.target.removesuffix(".part")


def _sealed(manifest: Manifest) -> bytes:
    return canonical(msgspec.to_builtins(manifest))


def _check_content(path: str, entry: FileEntry, track: Track) -> None:
    if entry.name.endswith(".safetensors"):
        check_header(read_header(path, name=entry.name), entry, track)
    elif entry.name.endswith(".safetensors.index.json"):
        check_index(path, track, name=entry.name)


def _check_denied(channel: Channel, manifest: Manifest, error: DeniedFile) -> None:
    """Is it this file alone? NotAFile if the store lists it not, as only what it would open is listed.

    StoreError if the whole store is denied, such as with credentials that ran out. A regular file that may
    not be read stays DeniedFile: a `chmod` or a new policy mends it without a trace in the listing.
    """
    channel.check_still_there(manifest.id)
    listed = {entry.path for entry in channel.store.list(manifest.folder)}
    absent = sorted({f"{manifest.folder}/{name}" for name, _ in manifest.files()} - listed)
    if absent:
        raise NotAFile(f"{', '.join(absent[:3])}: not a file of the store: {error}") from error


def _version_of(name: str) -> VersionId | None:
    stem, _, nonce = name.rpartition("-")
    return parse_stem(stem) if nonce else None


def _remove_unused(base: str, name: str) -> None:
    hidden = os.path.join(base, f".{name}")
    handle = locks.acquire(hidden + ".use", exclusive=True, wait=False)
    if handle is None:
        return
    try:
        # The seal first: a removal that is killed half-way leaves a folder that nobody takes for complete.
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(base, name, SELF_COPY))
        shutil.rmtree(os.path.join(base, name))
        for suffix in (".journal", ".filling", ".use"):
            with suppress(FileNotFoundError):
                os.unlink(hidden + suffix)
    finally:
        os.close(handle)
