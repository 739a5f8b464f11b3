"""One sequence of versions of one model inside a store: who may write, what is committed, what is newest.

The manifest's create-if-absent is the commit point, and the listing of `manifests/` is the truth; `head.json` is a
hint that saves a listing. Channel has no lock and no background thread: every method is one short conversation
with the store, and any number of processes may hold a Channel on the same root.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Mapping
from functools import partial
from os import PathLike

import msgspec

from . import epochs, logs
from .absent import absent, none_whole
from .canonical import canonical
from .channel_record import check_not_mirror, check_there, create_record, read_record
from .committing import create_manifest
from .epochs import Epoch
from .errors import (
    BadManifest,
    ChannelEmpty,
    Corrupt,
    InvalidInput,
    NotFound,
    Untrusted,
    VersionGone,
    VersionNotFound,
)
from .head import read_head, write_head
from .layout import CHANNEL, COLLECTED, MANIFESTS, SENT, lease_path, manifest_path, receipt_path, version_of
from .manifest import MAX_BYTES, Manifest, decode, seal
from .replaced import replaced_manifests
from .signing import Signer, Trust
from .store import store_at
from .store.base import Store, put_bytes, read_bytes
from .store.probe import enforces_create, is_there
from .version import VersionId, VersionQuery, parse_query

log = logs.get(__name__)

LIST_EVERY = 10
"""`poll` lists at least once in so many calls, also when the head has not moved: a publisher may die between the
commit and the head."""


class Channel:
    """Open one with `Channel.open` (reading; nothing is written) or `Channel.create` (publishing)."""

    def __init__(self, store: Store, *, trust: Trust | None = None, signer: Signer | None = None) -> None:
        self.store, self.trust, self.signer = store, trust, signer
        self._claims: dict[int, Epoch | None] = {}
        self._manifests: dict[VersionId, Manifest] = {}
        self._untrusted: set[int] = set()
        self._complained: set[tuple[VersionId, str]] = set()
        self._head: bytes | None = None
        self._newest: VersionId | None = None
        self._live: list[VersionId] = []
        self._polls = 0
        self._channel_id = ""

    @classmethod
    def open(
        cls,
        root: str | PathLike[str] | Store,
        *,
        require_signature: str | Trust | None = None,
        sign_key: str | Signer | None = None,
    ) -> Channel:
        """A channel to read from. The root may be empty still, or not exist: a watcher may start first.

        `require_signature`: trusted public keys (see `Trust.load`); what none of them signed is passed over as if it
        were not complete. `sign_key`: what is committed is signed (see `Signer.load`), and what it goes on from has to
        be signed too, by the same key unless others are trusted.
        """
        # Not "if there is any": an empty setting, of a secret that is not there, must not mean "no signature needed".
        signer = None if sign_key is None else Signer.load(sign_key)
        trust = Trust.load(require_signature) if require_signature is not None else signer.trust if signer else None
        return cls(store_at(root), trust=trust, signer=signer)

    @classmethod
    def create(
        cls,
        root: str | PathLike[str] | Store,
        *,
        require_signature: str | Trust | None = None,
        sign_key: str | Signer | None = None,
    ) -> Channel:
        """A channel to publish to; made if it is not there. Warns once if the store lets two writers both win.
        InvalidInput for a root that is a file."""
        channel = cls.open(root, require_signature=require_signature, sign_key=sign_key)
        is_there(channel.store)
        try:
            channel._channel_id = read_record(channel.store).channel_id
        except ChannelEmpty:
            channel._channel_id = channel._create_record()
        if not enforces_create(channel.store):
            log.warning(
                "%s does not enforce create-if-absent: a second publisher is detected at its commit, not prevented",
                channel.store.url,
                extra={"event": "no-create-if-absent"},
            )
        return channel

    @property
    def channel_id(self) -> str:
        """Raises ChannelEmpty while nothing was ever published here."""
        if not self._channel_id:
            self._channel_id = read_record(self.store).channel_id
        return self._channel_id

    # -- reading -----------------------------------------------------------------------------------------------

    def poll(self) -> VersionId | None:
        """The newest live, complete version, cheaply: one small read while nothing happens.

        Opening the head first is also what makes an NFS client look again at the folder (close-to-open). A name
        that may not exist yet is never probed: NFS remembers "absent" for a minute.
        """
        head = read_head(self.store)
        self._polls += 1
        if head is None or head != self._head or self._polls % LIST_EVERY == 0:
            self._newest = self._newest_complete()
            self._head = head
        return self._newest

    @property
    def newest(self) -> VersionId | None:
        """What `poll` found last. Reads nothing, so any thread may ask."""
        return self._newest

    def lag(self, version: VersionId | None) -> int:
        """How many live versions are newer than this one, as `poll` found them last. Reads nothing."""
        newest, live = self._newest, self._live
        if newest is None:
            return 0
        return max(0, bisect_right(live, newest) - (bisect_right(live, version) if version is not None else 0))

    def committed(self) -> list[VersionId]:
        """Every version with a manifest file, readable or not, live or left behind; ascending."""
        found = {v for entry in self.store.list(MANIFESTS) if (v := version_of(entry.path)) is not None}
        return sorted(found)

    def _check_claim(self, data: bytes, path: str) -> None:
        if self.trust is not None:
            self.trust.check_claim(data, self.channel_id, path)

    def versions(self) -> list[VersionId]:
        """The live versions by name, ascending; a torn manifest is found out by `manifest`."""
        return epochs.live(self.committed(), self.claims())

    def claims(self) -> Mapping[int, Epoch | None]:
        """Every claimed epoch. Claims are immutable, so each is read once."""
        for number in epochs.claimed(self.store):
            if self._claims.get(number) is None and number not in self._untrusted:
                self._claims[number] = self._read_claim(number)
        return self._claims

    def _read_claim(self, number: int) -> Epoch | None:
        """One that nobody trusted signed is as good as unreadable: it moves no reader."""
        try:
            return epochs.read_claim(self.store, number, self._check_claim)
        except Untrusted as error:
            log.warning("a claim is ignored: %s", error, extra={"event": "claim-ignored", "epoch": number})
            self._untrusted.add(number)
            return None

    def manifest(self, version: VersionId) -> Manifest:
        """The commit record. VersionNotFound if absent, BadManifest or UnsupportedFormat if it is not whole."""
        if version not in self._manifests:
            path = manifest_path(version)
            try:
                data = read_bytes(self.store, path, MAX_BYTES)
            except NotFound as error:
                raise VersionNotFound(f"{self.store.url} has no complete version {version} ({path})") from error
            try:
                found = decode(data, expect=version)
                if self.trust is not None:
                    self.trust.check_manifest(found, self.channel_id)
                self._remember(found)
            except Corrupt as error:
                raise type(error)(f"{path}: {error}") from error
        return self._manifests[version]

    def latest(self) -> Manifest:
        """The newest live, complete version. A version that is not whole is passed over with one warning.

        ChannelEmpty if nothing was ever committed; BadManifest if versions are there and none is whole, or Untrusted
        if none is signed by a trusted key, which is never to be mistaken for a fresh start.
        """
        newest = self._newest_complete()
        if newest is not None:
            return self.manifest(newest)
        if self.committed():
            raise none_whole(self.store.url, self._live, self.manifest)
        raise ChannelEmpty(f"{self.store.url} has no version yet: publish one, or check the root")

    def resolve(self, text: str | int) -> Manifest:
        """The manifest of `latest`, `42` (in the newest epoch that has it live, else the newest at all) or `e2-v42`.

        VersionGone if it was there once, VersionNotFound if it cannot have been. BadManifest if
        what is in its place is no file.
        """
        query = parse_query(text)
        if query.number is None:
            return self.latest()
        version = self.identify(text) if query.epoch is None else VersionId(query.epoch, query.number)
        try:
            return self.manifest(version)
        except VersionNotFound:
            raise self._absent(query) from None

    def identify(self, text: str | int) -> VersionId:
        """Which version `latest`, `42` or `e2-v42` is, though its manifest may be torn. Raises what `resolve` does."""
        query = parse_query(text)
        if query.number is None:
            return self.latest().id
        for candidates in (self.versions(), self.committed()):
            found = [v for v in candidates if v.number == query.number and query.epoch in {None, v.epoch}]
            if found:
                return found[-1]
        raise self._absent(query)

    def check_still_there(self, version: VersionId) -> None:
        """VersionGone if the version was collected since its manifest was read; StoreUnavailable if all is gone."""
        # Opened, not looked for in a listing of every version: the name was there once, and opening a file is what
        # an NFS client asks its server about.
        try:
            self.store.open(manifest_path(version)).close()
        except NotFound:
            check_there(self.store)
            raise VersionGone(f"{version} was collected from {self.store.url} in the meantime") from None

    # -- writing -----------------------------------------------------------------------------------------------

    def claim_epoch(self, run_id: str, resumed_from: VersionId | None = None) -> Epoch:
        """Claim the next epoch for this trainer attempt; every older publisher is fenced from now on.

        `resumed_from` is the version that the trainer goes on from; by default the newest live one. Readers leave
        the versions after it behind at once. By default numbers go on after every live version, complete or not, so
        that a version which turns up broken and its replacement never share a number. IsMirror if the root is a copy.
        """
        check_not_mirror(self.store)
        taken = self.versions()
        if resumed_from is not None:
            self.manifest(resumed_from)
            taken = [resumed_from]
        base = resumed_from or self._newest_complete()
        if base is not None:
            taken = sorted({*taken, base})  # an older trainer may have committed it since
        self._check_may_follow(base)
        sign = partial(self.signer.sign_claim, channel_id=self.channel_id) if self.signer else None
        epoch = epochs.claim(self.store, run_id, base, taken[-1].number + 1 if taken else 1, sign)
        resumed_from = epoch.resumed_from
        self._claims[epoch.number] = epoch
        if resumed_from is not None:
            write_head(self.store, self.manifest(resumed_from), epoch.number)
        return epoch

    def _check_may_follow(self, base: VersionId | None) -> None:
        if base is not None and self.signer is None and self.manifest(base).signed:
            raise InvalidInput(
                f"{base} in {self.store.url} is signed: without a key to sign with, no reader that requires signatures "
                "would load what comes after it (give sign_key, or --sign-key)"
            )
        if base is None and self.trust is not None and self.committed():
            raise InvalidInput(
                f"{self.store.url} has no version that is signed by a trusted key, and a signed one must not follow "
                "just any: name the version to go on from (resumed_from), or trust its key (require_signature)"
            )

    def seal(self, manifest: Manifest, *, source: Manifest | None = None) -> tuple[Manifest, bytes]:
        """The manifest with its own digest, signed if this channel has a key, and the bytes to store.

        `source`: the version whose weights it has, if they were read from the store: Untrusted if it is not signed by
        a trusted key, since the new signature would make anybody's weights good. InvalidInput if a signed version would
        have digests that can be forged.
        """
        sealed, data = seal(manifest)
        if self.signer is None:
            return sealed, data
        if source is not None and self.trust is not None:
            self.trust.check_manifest(source, self.channel_id)
        return self.signer.sign_manifest(sealed)

    def commit(self, epoch: Epoch, manifest: Manifest) -> Manifest:
        """Commit a version whose data is durable. The single point where it comes into being.

        Returns the committed manifest: the one given, or on a retry the identical content that is already there.
        Fenced if a newer epoch exists, VersionExists if the identity has other content. After an error nothing is
        known to be committed; calling again with the same manifest is safe.
        """
        epochs.check_fence(self.store, epoch)
        committed = create_manifest(self.store, manifest)
        self._remember(committed)
        write_head(self.store, committed, epoch.number)
        return committed

    def refresh_head(self) -> None:
        """Point the head at the newest version here; for who copied versions, or claims, to this root."""
        newest = self._newest_complete()
        if newest is not None:
            write_head(self.store, self.manifest(newest), max(self._claims, default=newest.epoch))

    # -- versions without files --------------------------------------------------------------------------------

    def note_sent(self, version: VersionId) -> None:
        """Say that this version is about to reach engines without files; before the first engine has it."""
        put_bytes(self.store, SENT, canonical({"epoch": version.epoch, "number": version.number}))

    def newest_sent(self) -> VersionId | None:
        """What `note_sent` said last; None if no trainer of this channel has ever sent without files."""
        try:
            found = msgspec.json.decode(read_bytes(self.store, SENT, 1 << 16), type=dict[str, int])
            return VersionId(found["epoch"], found["number"])
        except (NotFound, msgspec.DecodeError, KeyError):
            return None

    # -- receipts and leases -----------------------------------------------------------------------------------

    def write_receipt(self, reader: str, receipt: Mapping[str, object]) -> None:
        """Say what this reader serves now. Overwrites its previous receipt. StoreUnavailable where the channel is gone:
        nothing is left in the folder under a mount, which some file systems then refuse to be mounted on."""
        check_there(self.store)
        put_bytes(self.store, receipt_path(reader), canonical({"reader": reader, **receipt}))

    def withdraw_receipt(self, reader: str) -> None:
        """This reader has ended: it serves nothing that retention or back-pressure should go by."""
        with contextlib.suppress(NotFound):
            self.store.delete(receipt_path(reader))

    def receipt(self, reader: str) -> Mapping[str, object]:
        """What this reader said last; empty if it has said nothing, or nothing readable."""
        try:
            found = msgspec.json.decode(read_bytes(self.store, receipt_path(reader), 1 << 16), type=dict[str, object])
        except (NotFound, msgspec.DecodeError):
            return {}
        return found

    def lease(self, reader: str, version: VersionId, seconds: float) -> None:
        """Say that this reader is reading `version`, so that it is not collected. Expires by itself, `seconds` after it
        was written by the store's clock; write it again to renew it. StoreUnavailable where the channel is gone."""
        check_there(self.store)
        record = {"reader": reader, "epoch": version.epoch, "number": version.number}
        put_bytes(
            self.store, lease_path(reader), canonical({**record, "since": time.time(), "seconds": float(seconds)})
        )

    def release(self, reader: str) -> None:
        """Drop this reader's lease."""
        self.store.delete(lease_path(reader))

    # -- inside ------------------------------------------------------------------------------------------------

    def _absent(self, query: VersionQuery) -> NotFound:
        for version, problem in replaced_manifests(self.store).items():
            if version.number == query.number and query.epoch in {None, version.epoch}:
                raise BadManifest(f"{self.store.url}: {version}: {problem}")
        noted = {v for entry in self.store.list(COLLECTED) if (v := version_of(entry.path)) is not None}
        return absent(self.store.url, query, self.committed(), self.claims(), noted)

    def _remember(self, manifest: Manifest) -> None:
        # A manifest of a large MoE weighs tens of megabytes: keep a few, the newest used last.
        self._manifests.pop(manifest.id, None)
        while len(self._manifests) >= 8:
            self._manifests.pop(next(iter(self._manifests)))
        self._manifests[manifest.id] = manifest

    def _newest_complete(self) -> VersionId | None:
        self._live = self.versions()
        for version in reversed(self._live):
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
            log.warning(
                "%s is incomplete and is passed over: %s", version, error, extra=logs.about(version, event="incomplete")
            )

    def _create_record(self) -> str:
        if self.committed():
            # Another trainer may have made the channel, and published, since we looked for its record.
            with contextlib.suppress(ChannelEmpty):
                return read_record(self.store).channel_id
            raise BadManifest(f"{self.store.url} holds versions but no {CHANNEL}: restore it before publishing")
        return create_record(self.store).channel_id
