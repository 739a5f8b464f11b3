"""A cache of verified versions on this host, on a local disk or in memory (/dev/shm).

    <stage>/<channel id>/<version>-<nonce>/            the listed files; ckptsync.json once all are verified
    <stage>/<channel id>/.<version>-<nonce>.journal    which files are verified; survives a kill
                                        ....filling    held alone while the store is read
                                        ....use        held shared by whoever serves or loads the version

Any number of engines on the host share it: one reads the store, the others wait and find the version
complete. Folders are made private (0700): an engine that runs as another user needs its own stage.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from ckptsync import logs
from ckptsync.channel import Channel
from ckptsync.delta import open_chain, whole
from ckptsync.engine import StagedVersion
from ckptsync.errors import BadShard, BrokenChain, CkptSyncError, NotFound, StoreFull, UnsupportedFormat
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import FileEntry, Manifest, Track, check_basename
from ckptsync.shards.file import FileReader
from ckptsync.shards.read import check_header, read_header
from ckptsync.store.base import Reader, Store
from ckptsync.version import VersionId, parse_stem
from ckptsync.wording import exact_bytes

from . import locks
from .fetch import DeniedFile, Download, fetch, local_errors, private_folder
from .journal import Journal
from .proof import check_index

log = logs.get(__name__)

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
        with local_errors(self.folder):
            slot = self._slot(manifest)
            self._hold(slot)
            try:
                if not slot.is_complete():
                    with locks.exclusive(slot.path(".filling")):
                        if not slot.is_complete():
                            self._fill(slot, channel, progress or (lambda _: None), reader, manifest)
            except BaseException:
                self._let_go(slot.folder)
                raise
            return StagedVersion(manifest=slot.manifest, folder=slot.folder)

    def find(self, manifest: Manifest) -> StagedVersion | None:
        """The version if it is here already, held as by `stage`; the store is not read. StoreError if this host's file
        system fails."""
        with local_errors(self.folder):
            slot = self._slot(manifest)
            if not slot.is_complete():
                return None
            self._hold(slot)
            if slot.is_complete():
                return StagedVersion(manifest=slot.manifest, folder=slot.folder)
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
        """Remove versions of a channel that nobody on this host uses, save the `keep` newest. StoreError if this host's
        file system fails."""
        with local_errors(self.folder):
            found = self._folders(channel_id)
            for _, name in found[: max(0, len(found) - keep)]:
                _remove_unused(self._private(channel_id), name)

    # -- inside ------------------------------------------------------------------------------------------

    def _folders(self, channel_id: str) -> list[tuple[VersionId, str]]:
        """The versions of a channel that have a folder here, complete or not, and its name; the oldest first."""
        names = os.listdir(self._private(channel_id))
        return sorted((version, name) for name in names if (version := _version_of(name)) is not None)

    def _slot(self, manifest: Manifest) -> _Slot:
        """A delta version is kept as the full one that it stands for, and is one for every engine."""
        return _Slot(self._private(manifest.channel_id), manifest.full_form())

    def _fill(self, slot: _Slot, channel: Channel, progress: Progress, reader: str | None, published: Manifest) -> None:
        if published.parent is not None:
            try:
                with self._rebuilding(channel, published, local=True) as store:
                    self._fill_from(store, slot, channel, progress, reader)
                return
            except (BadShard, BrokenChain, UnsupportedFormat) as error:
                log.warning(
                    "%s is made from the store alone, not from what is here: %s",
                    published.id,
                    error,
                    extra={"event": "rebuilt-from-store"},
                )
        with self._rebuilding(channel, published, local=False) as store:
            self._fill_from(store, slot, channel, progress, reader)

    def _fill_from(self, store: Store, slot: _Slot, channel: Channel, progress: Progress, reader: str | None) -> None:
        with self._lease(channel, slot.manifest.id, reader) as renew:
            self.evict(slot.manifest.channel_id, self.keep - 1)

            def moved(count: int) -> None:
                renew()
                progress(count)

            slot.make_folders()
            wanted = [download for download in slot.downloads() if not slot.has(download)]
            slot.check_room(sum(download.entry.size for download in wanted))
            try:
                with closing(fetch(store, wanted, moved)) as arriving:
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
    def _rebuilding(self, channel: Channel, manifest: Manifest, *, local: bool) -> Iterator[Store]:
        """Where the version's files come from: the store, or a version before it (here, if `local`) and the changes
        since."""
        if manifest.parent is None or not local:
            with whole(channel, manifest, spool=self._private(manifest.channel_id)) as (store, _):
                yield store
            return
        # Looked up by number first: whether one is the very version takes its whole manifest.
        here = {version for version, _ in self._folders(manifest.channel_id) if version != manifest.id}
        bases: dict[VersionId, StagedVersion | None] = {}

        def held(base: Manifest) -> Callable[[str], Reader] | None:
            if base.id not in here:
                return None
            if base.id not in bases:
                bases[base.id] = self.find(base)
            found = bases[base.id]
            return (lambda path: FileReader(os.path.join(found.folder, path))) if found else None

        own = set(self._in_use)
        try:
            with open_chain(
                channel,
                manifest,
                held=held if here else None,
                oldest=min(here, default=manifest.id),
                spool=self._private(manifest.channel_id),
            ) as store:
                yield store
        finally:
            for base in bases.values():
                if base is not None and base.folder not in own:
                    self.release(base)

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
        """Leases are advisory: a reader of a read-only store works without. Tried each time: it may have been away."""
        try:
            write()
            self._lease_failed = False
        except CkptSyncError as error:  # also a bucket that is gone, or a name that is contended
            if not self._lease_failed:
                log.warning(
                    "no lease can be written (%s): the publisher's retention does not know of this reader",
                    error,
                    extra={"event": "no-lease"},
                )
            self._lease_failed = True

    def _private(self, channel_id: str) -> str:
        return private_folder(os.path.join(self.folder, check_basename(channel_id, "channel")))

    def _hold(self, slot: _Slot) -> None:
        held = self._in_use.get(slot.folder)
        if held is not None and not locks.is_still(held, slot.path(".use")):
            self._let_go(slot.folder)  # somebody emptied the stage: that lock holds nothing any more
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
            raise StoreFull(
                f"the stage {self.base} has {exact_bytes(free)} free, {self.manifest.id} needs {exact_bytes(needed)}"
            )

    def is_complete(self) -> bool:
        try:
            with open(os.path.join(self.folder, SELF_COPY), "rb") as file:
                sealed = file.read()
        except FileNotFoundError:
            return False
        return sealed == self.manifest.encoded and all(
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
            _check_content(download.target, download.entry, self._track_of[id(download.entry)])
        except BadShard:
            os.unlink(download.target)
            raise
        os.rename(download.target, _final(download))
        self.journal.add(_final(download), download.entry)

    @functools.cached_property
    def _track_of(self) -> dict[int, Track]:
        """By the entry itself: files of two tracks may be named alike."""
        return {id(file): track for track in self.manifest.tracks.values() for file in track.files}

    def seal(self) -> None:
        """Remove what is not listed, such as a killed attempt's leftovers, then say that all is here."""
        listed = {_final(download) for download in self.downloads()}
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if os.path.join(folder, name) not in listed:
                    os.unlink(os.path.join(folder, name))
        path = os.path.join(self.folder, SELF_COPY)
        with open(os.open(path + ".part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(self.manifest.encoded)
        os.rename(path + ".part", path)


def _final(download: Download) -> str:
    return download.target.removesuffix(".part")


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
        # Another process that evicts may have listed it too, and been first.
        if os.path.lexists(os.path.join(base, name)):
            shutil.rmtree(os.path.join(base, name))
        for suffix in (".journal", ".filling", ".use"):
            with suppress(FileNotFoundError):
                os.unlink(hidden + suffix)
    finally:
        os.close(handle)
