"""One sequence of versions of one model inside a store: who may write, what is committed, what is newest.

The manifest's create-if-absent is the commit point, and the listing of `manifests/` is the truth; `head.json` is a
hint that saves a listing. Channel has no lock and no background thread: every method is one short conversation
with the store, and any number of processes may hold a Channel on the same root.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Mapping

import msgspec

from . import epochs
from .epochs import Epoch
from .errors import (
    AlreadyExists,
    BadManifest,
    ChannelEmpty,
    Corrupt,
    NotFound,
    StoreError,
    StoreUnavailable,
    VersionExists,
    VersionGone,
    VersionNotFound,
)
from .layout import CHANNEL, HEAD, MANIFESTS, lease_path, manifest_path, receipt_path, version_of
from .manifest import FORMAT, MAX_BYTES, Manifest, canonical, decode
from .store import open_store
from .store.base import Store, put_bytes, read_bytes
from .store.probe import enforces_create
from .version import VersionId, parse_query

log = logging.getLogger(__name__)

LIST_EVERY = 10
"""`poll` lists at least once in so many calls, also when the head has not moved: a publisher may die between the
commit and the head."""


class ChannelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`channel.json`: written once, by whoever publishes first."""

    format: int
    channel_id: str
    created: float


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """`head.json`: a hint at the newest version, overwritten; a torn one is told by not parsing and is ignored."""

    epoch: int
    number: int
    manifest_digest: str
    length: int
    claimed: int
    """The newest epoch claimed, so that a resume to an earlier version wakes readers before its first publish."""


class Channel:
    """Open one with `Channel.open` (reading; nothing is written) or `Channel.create` (publishing)."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._claims: dict[int, Epoch | None] = {}
        self._manifests: dict[VersionId, Manifest] = {}
        self._complained: set[tuple[VersionId, str]] = set()
        self._head: bytes | None = None
        self._newest: VersionId | None = None
        self._polls = 0
        self._channel_id = ""

    @classmethod
    def open(cls, root: str | Store) -> Channel:
        """A channel to read from. The root may be empty still, or not exist: a watcher may start first."""
        return cls(open_store(root) if isinstance(root, str) else root)

    @classmethod
    def create(cls, root: str | Store) -> Channel:
        """A channel to publish to; made if it is not there. Warns once if the store lets two writers both win."""
        channel = cls.open(root)
        try:
            channel._channel_id = channel._read_record().channel_id
        except ChannelEmpty:
            channel._channel_id = channel._create_record()
        if not enforces_create(channel.store):
            log.warning(
                "%s does not enforce create-if-absent: a second publisher is detected at its commit, not prevented",
                channel.store.url,
            )
        return channel

    @property
    def channel_id(self) -> str:
        """Raises ChannelEmpty while nothing was ever published here."""
        if not self._channel_id:
            self._channel_id = self._read_record().channel_id
        return self._channel_id

    # -- reading -----------------------------------------------------------------------------------------------

    def poll(self) -> VersionId | None:
        """The newest live, complete version, cheaply: one small read while nothing happens.

        Opening the head first is also what makes an NFS client look again at the folder (close-to-open). A name
        that may not exist yet is never probed: NFS remembers "absent" for a minute.
        """
        head = self._read_head()
        self._polls += 1
        if head is None or head != self._head or self._polls % LIST_EVERY == 0:
            self._newest = self._newest_complete()
            self._head = head
        return self._newest

    def committed(self) -> list[VersionId]:
        """Every version with a manifest file, readable or not, live or left behind; ascending."""
        found = {v for entry in self.store.list(MANIFESTS) if (v := version_of(entry.path)) is not None}
        return sorted(found)

    def versions(self) -> list[VersionId]:
        """The live versions by name, ascending; a torn manifest is found out by `manifest`."""
        return epochs.live(self.committed(), self.claims())

    def claims(self) -> Mapping[int, Epoch | None]:
        """Every claimed epoch. Claims are immutable, so each is read once."""
        for number in epochs.claimed(self.store):
            if self._claims.get(number) is None:
                self._claims[number] = epochs.read_claim(self.store, number)
        return self._claims

    def manifest(self, version: VersionId) -> Manifest:
        """The commit record. VersionNotFound if absent, BadManifest or UnsupportedFormat if it is not whole."""
        if version not in self._manifests:
            path = manifest_path(version)
            try:
                data = read_bytes(self.store, path, MAX_BYTES)
            except NotFound as error:
                raise VersionNotFound(f"{self.store.url} has no complete version {version} ({path})") from error
            self._remember(decode(data, expect=version))
        return self._manifests[version]

    def latest(self) -> Manifest:
        """The newest live, complete version. A version that is not whole is passed over with one warning.

        ChannelEmpty if nothing was ever committed; BadManifest if versions are there and none is whole, which is
        never to be mistaken for a fresh start.
        """
        newest = self._newest_complete()
        if newest is not None:
            return self.manifest(newest)
        if self.committed():
            raise BadManifest(f"{self.store.url} holds versions, but none of them is complete and live")
        raise ChannelEmpty(f"{self.store.url} has no version yet: publish one, or check the root")

    def resolve(self, text: str) -> Manifest:
        """The manifest of `latest`, `42` (in the newest epoch that has it live, else the newest at all) or `e2-v42`."""
        query = parse_query(text)
        if query.number is None:
            return self.latest()
        if query.epoch is not None:
            return self.manifest(VersionId(query.epoch, query.number))
        for candidates in (self.versions(), self.committed()):
            found = [v for v in candidates if v.number == query.number]
            if found:
                return self.manifest(found[-1])
        raise VersionNotFound(f"{self.store.url} has no complete version {query.number}")

    def check_still_there(self, version: VersionId) -> None:
        """VersionGone if the version was collected since its manifest was read."""
        if version not in self.committed():
            raise VersionGone(f"{version} was collected from {self.store.url} in the meantime")

    # -- writing -----------------------------------------------------------------------------------------------

    def claim_epoch(self, run_id: str, resumed_from: VersionId | None = None) -> Epoch:
        """Claim the next epoch for this trainer attempt; every older publisher is fenced from now on.

        `resumed_from` is the version that the trainer goes on from; by default the newest live one. Readers leave
        the versions after it behind at once. By default numbers go on after every live version, complete or not, so
        that a version which turns up broken and its replacement never share a number.
        """
        taken = self.versions()
        if resumed_from is not None:
            self.manifest(resumed_from)
            taken = [resumed_from]
        base = resumed_from or self._newest_complete()
        epoch = epochs.claim(self.store, run_id, base, taken[-1].number + 1 if taken else 1)
        resumed_from = epoch.resumed_from
        self._claims[epoch.number] = epoch
        if resumed_from is not None:
            self._write_head(self.manifest(resumed_from), epoch.number)
        return epoch

    def commit(self, epoch: Epoch, manifest: Manifest) -> Manifest:
        """Commit a version whose data is durable. The single point where it comes into being.

        Returns the committed manifest: the one given, or on a retry the identical content that is already there.
        Fenced if a newer epoch exists, VersionExists if the identity has other content. After an error nothing is
        known to be committed; calling again with the same manifest is safe.
        """
        epochs.check_fence(self.store, epoch)
        data = canonical(msgspec.to_builtins(manifest))
        decode(data, expect=manifest.id)
        committed = self._create_manifest(manifest, data)
        self._remember(committed)
        self._write_head(committed, epoch.number)
        return committed

    def _create_manifest(self, manifest: Manifest, data: bytes) -> Manifest:
        path = manifest_path(manifest.id)
        try:
            self.store.create(path, data)
        except AlreadyExists:
            return self._settle(manifest)
        except StoreUnavailable:
            # The answer was lost, not necessarily the write: only a read can tell.
            try:
                return self._settle(manifest)
            except VersionNotFound:
                pass
            raise
        return self._settle(manifest)

    def _settle(self, mine: Manifest) -> Manifest:
        """Who owns the identity now? Read back after every create: some mounts let two creators both win."""
        try:
            found = decode(read_bytes(self.store, manifest_path(mine.id), MAX_BYTES), expect=mine.id)
        except NotFound as error:
            raise VersionNotFound(f"{mine.id} is not there after its commit") from error
        if found.nonce == mine.nonce or found.content_digest == mine.content_digest:
            return found
        raise VersionExists(
            f"{mine.id} is already published by run {found.run_id} with other content; versions are immutable: "
            "publish under the next number"
        )

    # -- receipts and leases -----------------------------------------------------------------------------------

    def write_receipt(self, reader: str, receipt: Mapping[str, object]) -> None:
        """Say what this reader serves now. Overwrites its previous receipt."""
        put_bytes(self.store, receipt_path(reader), canonical({"reader": reader, **receipt}))

    def lease(self, reader: str, version: VersionId, seconds: float) -> None:
        """Say that this reader is reading `version`, so that it is not collected. Advisory; expires by itself."""
        now = time.time()
        record = {"reader": reader, "epoch": version.epoch, "number": version.number}
        put_bytes(self.store, lease_path(reader), canonical({**record, "since": now, "expires": now + seconds}))

    def release(self, reader: str) -> None:
        """Drop this reader's lease."""
        self.store.delete(lease_path(reader))

    # -- inside ------------------------------------------------------------------------------------------------

    def _remember(self, manifest: Manifest) -> None:
        # A manifest of a large MoE weighs tens of megabytes: keep a few, the newest used last.
        self._manifests.pop(manifest.id, None)
        while len(self._manifests) >= 8:
            self._manifests.pop(next(iter(self._manifests)))
        self._manifests[manifest.id] = manifest

    def _newest_complete(self) -> VersionId | None:
        for version in reversed(self.versions()):
            try:
                self.manifest(version)
            except VersionNotFound:
                continue  # collected between the listing and the read
            except Corrupt as error:
                self._complain_once(version, error)
                continue
            return version
        return None

    def _complain_once(self, version: VersionId, error: Corrupt) -> None:
        if (version, str(error)) not in self._complained:
            self._complained.add((version, str(error)))
            log.warning("%s is incomplete and is passed over: %s: %s", version, manifest_path(version), error)

    def _read_head(self) -> bytes | None:
        try:
            return read_bytes(self.store, HEAD, 1 << 16)
        except (NotFound, Corrupt):
            return None

    def _write_head(self, manifest: Manifest, claimed: int) -> None:
        data = canonical(msgspec.to_builtins(manifest))
        head = Head(
            epoch=manifest.epoch,
            number=manifest.number,
            manifest_digest=manifest.manifest_digest,
            length=len(data),
            claimed=claimed,
        )
        try:
            put_bytes(self.store, HEAD, msgspec.json.encode(head))
        except StoreError as error:
            log.warning("%s was not updated (%s); readers find %s by listing", HEAD, error, manifest.id)

    def _read_record(self) -> ChannelRecord:
        try:
            data = read_bytes(self.store, CHANNEL, 1 << 16)
        except NotFound as error:
            raise ChannelEmpty(f"{self.store.url} is not a channel yet: nothing was ever published") from error
        try:
            record = msgspec.json.decode(data, type=ChannelRecord)
        except msgspec.DecodeError as error:
            raise BadManifest(f"{self.store.url}/{CHANNEL} is torn or not ours: {error}") from error
        if record.format != FORMAT:
            raise BadManifest(f"{self.store.url} is a channel of format {record.format}, this release reads {FORMAT}")
        return record

    def _create_record(self) -> str:
        if self.committed():
            raise BadManifest(f"{self.store.url} holds versions but no {CHANNEL}: restore it before publishing")
        record = ChannelRecord(format=FORMAT, channel_id=uuid.uuid4().hex, created=time.time())
        # Another trainer's, or our own with a lost answer: the file says.
        with contextlib.suppress(AlreadyExists, StoreUnavailable):
            self.store.create(CHANNEL, msgspec.json.encode(record))
        return self._read_record().channel_id
