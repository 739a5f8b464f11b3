"""Is every version of a channel still there, with everything that it is made from?

Looks at manifests and listings, and reads the deltas' files, which are small; a repair reads the full version besides
that the newest is made from, and `verify` reads every byte.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

import msgspec

from . import epochs
from .channel import Channel
from .channel_record import copied_again
from .copies import compact
from .delta.plan import REMEDY, Chain, Edge, Link, cheapest
from .errors import BadShard, BrokenChain, Corrupt, IsMirror, NotFound, StoreDenied, Unrepairable, VersionNotFound
from .manifest import FileEntry, Manifest, delta_path
from .presence import absent_files, said_absent, sizes
from .replaced import replaced_manifests
from .rollback import roll_back
from .verify import check_files, verified_chunks
from .version import VersionId


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. `lost`: the version cannot be read any more; else there is another way to it."""

    version: VersionId
    lost: bool
    message: str


class _Look:
    """One look at a channel."""

    def __init__(self, channel: Channel, progress: Callable[[int], None], *, read: bool = True) -> None:
        self._channel, self._progress, self._read = channel, progress, read
        self.sizes = sizes(channel.store)
        self.broken: dict[Edge, str] = {}
        self.incomplete: dict[VersionId, str] = {}
        """What is wrong with the shards of full versions: by their own deltas they may be made all the same."""
        self.gone: dict[VersionId, str] = {}
        """What else a version lacks of its own files, for which there is no other way."""
        self._proven: set[VersionId] = set()
        """Full versions of which every byte was read."""

    def at(self, version: VersionId) -> Manifest:
        """The manifest, after its own files were looked at."""
        manifest = self._channel.manifest(version)
        for path, file in manifest.stored_files():
            if not path.startswith("delta/") and (problem := self._absent(manifest, path, file)):
                shard = manifest.kind == "full" and path.endswith(".safetensors")
                (self.incomplete if shard else self.gone).setdefault(version, problem)
        for base in manifest.deltas:
            if problem := self._damaged(Link(manifest, base)):
                self.broken[version, base.id] = problem
        return manifest

    def findings(self, manifest: Manifest) -> Iterator[Finding]:
        for (version, base), problem in self.broken.items():
            if version == manifest.id:
                yield Finding(version=version, lost=False, message=f"its delta against {base}: {problem}")
        if lost := self.lost(manifest):
            yield Finding(version=manifest.id, lost=True, message=lost)
        elif manifest.id in self.incomplete:
            message = f"{self.incomplete[manifest.id]}; its delta makes it all the same"
            yield Finding(version=manifest.id, lost=False, message=message)

    def read_start(self, manifest: Manifest) -> None:
        """Read the shards of the full version that this one is made from; those of the next, if they are damaged."""
        while not self.lost(manifest) and (start := self._chain(manifest).start).id not in self._proven:
            try:
                check_files(self._channel.store, start, self._progress, prefix=f"{start.folder}/")
                self._proven.add(start.id)
            except (BadShard, NotFound) as error:
                (self.incomplete if start.kind == "full" else self.gone)[start.id] = self._short(error, start)

    def lost(self, manifest: Manifest) -> str:
        """Why there is no way to the version; empty if there is one."""
        if manifest.id in self.gone:
            return self.gone[manifest.id]
        if not manifest.deltas and manifest.id in self.incomplete:
            return self.incomplete[manifest.id]
        try:
            chain = self._chain(manifest)
        except BrokenChain as error:
            return str(error).removesuffix(f": {REMEDY}")
        gone = [m.id for m in (chain.start, *(link.manifest for link in chain.links)) if m.id in self.gone]
        return f"{gone[0]}, which it is made from: {self.gone[gone[0]]}" if gone else ""

    def _chain(self, manifest: Manifest) -> Chain:
        return cheapest(self._channel, manifest, avoid=self.broken, damaged=self.incomplete)

    def _absent(self, manifest: Manifest, path: str, file: FileEntry) -> str:
        found = self.sizes.get(f"{manifest.folder}/{path}")
        if found == file.size:
            return ""
        return self._why_unlisted(manifest, path) if found is None else said_absent(manifest, path, file, self.sizes)

    def _why_unlisted(self, manifest: Manifest, path: str) -> str:
        """A store lists plain files alone; opened, whatever is there instead says what it is: a link, a folder."""
        try:
            self._channel.store.open(f"{manifest.folder}/{path}").close()
        except NotFound as error:
            plain = isinstance(error.__cause__, FileNotFoundError)
            return f"{path} is not there" + ("" if plain else f" ({self._short(error, manifest)})")
        except StoreDenied as error:
            return self._short(error, manifest)
        return f"{path} is not in the store's listing"

    def _short(self, error: Exception, manifest: Manifest) -> str:
        """Where the version's folder is said already, by its version."""
        return str(error).replace(f"{self._channel.store.url}/{manifest.folder}/", "")

    def _damaged(self, link: Link) -> str:
        for track, files in link.base.files.items():
            for file in files:
                path = delta_path(link.base.id, track, file.name)
                if problem := self._absent(link.manifest, path, file):
                    return problem
                if not self._read:
                    continue
                reader = self._channel.store.open(f"{link.manifest.folder}/{path}")
                try:
                    for part in verified_chunks(reader, file, link.manifest.digest, path):
                        self._progress(len(part))
                except BadShard as error:
                    return str(error)
                finally:
                    reader.close()
        return ""


def fsck(
    channel: Channel, progress: Callable[[int], None] = lambda _: None, *, read_newest: bool = False
) -> list[Finding]:
    """Everything that is wrong with the channel's versions, oldest first. `read_newest`: also in the bytes of the full
    version that the newest is made from. Raises StoreError if it cannot look."""
    return _fsck(channel, progress, read_newest)[0]


def live_of(channel: Channel, findings: Iterable[Finding]) -> set[VersionId]:
    """The live versions, those among them too whose manifest no listing has, since something else is in its place."""
    return set(epochs.live(sorted({*channel.committed(), *(f.version for f in findings)}), channel.claims()))


def needed(channel: Channel, findings: Collection[Finding]) -> list[Finding]:
    """Those findings that readers of `latest` meet: of the newest live version, or of a live one after it whose
    manifest is not whole."""
    live, newest = live_of(channel, findings), channel.poll()
    return [f for f in findings if f.lost and f.version in live and (newest is None or f.version >= newest)]


def newest_missing(channel: Channel) -> str:
    """What the newest live version lacks of the files that it is read from, by names and sizes alone; empty if it is
    all there, or if there is no version."""
    if (newest := channel.poll()) is None:
        return ""
    look = _Look(channel, lambda _: None, read=False)
    for version in channel.committed():
        with suppress(Corrupt, VersionNotFound):
            look.at(version)
    manifest = channel.manifest(newest)
    if lost := look.lost(manifest):
        return lost
    absent = [said_absent(manifest, *each, look.sizes) for each in absent_files(manifest, look.sizes)]
    return absent[0] if absent else ""


def repair(channel: Channel, progress: Callable[[int], None] = lambda _: None) -> Manifest | None:
    """Make the newest live version that can still be read the newest of all, as a full one, if something is wrong on
    the newest line.

    None if nothing needs it. As `compact`: no trainer may run, and the lost versions after it are left behind; one that
    is full already is rolled back to. Unrepairable if no live version can be read, IsMirror for a copy, which is
    mended from its source.
    """
    findings, look = _fsck(channel, progress, read_newest=True)
    if live_of(channel, findings).isdisjoint(finding.version for finding in findings):
        return None
    if again := copied_again(channel.store):
        raise IsMirror(f"{channel.store.url} is a mirror, which is not repaired out of itself: {again}")
    newest = channel.poll()
    for version in reversed(channel.versions()):
        try:
            manifest = channel.manifest(version)
        except (Corrupt, NotFound):
            continue
        look.read_start(manifest)
        if look.lost(manifest):
            continue
        if manifest.kind == "delta" or version in look.incomplete:
            return compact(channel, manifest, progress=progress, damaged=look.incomplete)
        return None if version == newest else roll_back(channel, manifest, "fsck --repair", leaving=True)
    raise Unrepairable(
        f"no live version of {channel.store.url} can be read: there is nothing to repair it from. What helps: a mirror "
        "of it (`ckptsync export MIRROR latest DIR`) or an earlier export, by `ckptsync import ROOT DIR`; or a trainer "
        "that resumes from a checkpoint of its own and publishes a full version"
    )


def _fsck(channel: Channel, progress: Callable[[int], None], read_newest: bool) -> tuple[list[Finding], _Look]:
    look, manifests, findings = _Look(channel, progress), [], []
    for version in channel.committed():
        try:
            manifests.append(look.at(version))
        except VersionNotFound:
            continue  # collected meanwhile
        except Corrupt as error:
            findings.append(Finding(version=version, lost=True, message=str(error)))
    for version, problem in replaced_manifests(channel.store).items():
        findings.append(Finding(version=version, lost=True, message=problem))
    if read_newest and (newest := channel.poll()) is not None:
        with suppress(Corrupt, NotFound):
            look.read_start(channel.manifest(newest))
    findings += [finding for manifest in manifests for finding in look.findings(manifest)]
    return sorted(findings, key=lambda finding: finding.version), look
