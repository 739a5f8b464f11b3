"""Deleting what retention lets go: a note, then the manifest, and after a grace time the data.

    collected/e0001-v00000041.json    written first: pins and leases that come later see it (`holds`)
    manifests/e0001-v00000041.json    deleted: from now on the version is gone for who lists
    data/e0001-v00000041-<nonce>/     deleted when the note is as old as the grace time and nobody holds the version
    collected/e0001-v00000041.json    deleted last

A run may die between any two of these: the next one, by whomever, decides anew about a version whose manifest is
there still, and goes on with one whose is not. Nothing that is gone already is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from . import logs
from .canonical import canonical
from .channel import Channel
from .collector_claim import claimed
from .errors import BadManifest, Corrupt, NotFound, StoreError, StoreUnavailable, UnsupportedFormat, VersionNotFound
from .holds import collected_versions, forget_dead, held
from .layout import COLLECTED, COLLECTOR, DATA, MANIFESTS, SELF_COPY, collected_path, manifest_path, version_of
from .manifest import Kind, Origin
from .replaced import replaced_manifests
from .retention import Candidate, Plan, Retention, decide, needs_of
from .store.base import Entry, put_bytes, read_bytes
from .store.clock import StoreClock
from .version import VersionId

log = logs.get(__name__)


class Collected(NamedTuple):
    """What one run did."""

    versions: tuple[VersionId, ...]
    """That ended, newest first."""

    files: int
    nbytes: int
    """Of data that were deleted, of these versions and of earlier ones."""

    waiting: int
    """Versions that have ended and whose data are there still: for the grace time, a reader, or since the store
    refuses to delete them."""


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """`collected/<version>.json`: what is to be deleted. The file's own time says when the version ended."""

    folder: str
    """Empty for a version that shares another's."""

    needs: tuple[VersionId, ...]


class _Facts(NamedTuple):
    """What is remembered of a manifest, which may weigh megabytes."""

    kind: Kind
    created: float
    note: Note


class _Survey(NamedTuple):
    candidates: list[Candidate]
    live: Collection[VersionId]
    unreadable: dict[VersionId, bool]

    def plan(self, policy: Retention, held: Mapping[VersionId, str]) -> Plan:
        return decide(policy, self.candidates, live=self.live, held=held, unreadable=self.unreadable)


class Collector:
    """Applies one policy to one channel, again and again, reading each manifest once. For one thread."""

    def __init__(self, channel: Channel, policy: Retention) -> None:
        self.channel, self.policy = channel, policy
        self._store = channel.store
        self._facts: dict[VersionId, _Facts] = {}
        self._notes: dict[VersionId, Note] = {}
        self._refused: set[str] = set()

    def plan(self, clock: StoreClock) -> Plan:
        """What would go now. Raises StoreError, or Corrupt if a lease or a receipt cannot be read."""
        return self._survey(clock).plan(self.policy, held(self._store, clock))

    def by_policy(self, clock: StoreClock) -> Plan:
        """What would go if nobody held anything."""
        return self._survey(clock).plan(self.policy, {})

    def collect(self) -> Collected:
        """One run. Conflict if another collector is at work; what `plan` raises.

        What the store refuses to delete stays, with a warning, and is tried again by the next run.
        """
        clock = StoreClock.ask(self._store, COLLECTOR)
        with claimed(self._store, clock) as renew:
            ended = self._end(clock, renew)
            files, nbytes, waiting = self._bury(clock, renew)
            forget_dead(self._store, clock)
        return Collected(tuple(ended), files, nbytes, waiting)

    # -- versions ----------------------------------------------------------------------------------------------

    def _survey(self, clock: StoreClock) -> _Survey:
        candidates, unreadable = [], dict[VersionId, bool]()
        sizes = self._sizes() if self.policy.max_bytes is not None else {}
        for entry in self._store.list(MANIFESTS):
            if (version := version_of(entry.path)) is None:
                continue
            try:
                kind, created, note = self._look_at(version)
            except VersionNotFound:
                continue  # deleted since the listing
            except Corrupt as error:
                unreadable[version] = isinstance(error, UnsupportedFormat)
                continue
            age = clock.age(max(entry.modified, created) if entry.modified else 0.0, created)
            candidates.append(Candidate(version, kind, note.needs, sizes.get(note.folder, 0), age))
        unreadable |= dict.fromkeys(replaced_manifests(self._store), False)
        there = {candidate.id for candidate in candidates}
        self._facts = {version: facts for version, facts in self._facts.items() if version in there}
        return _Survey(candidates, set(self.channel.versions()), unreadable)

    def _look_at(self, version: VersionId) -> _Facts:
        if version not in self._facts:
            manifest = self.channel.manifest(version)
            shared = isinstance(manifest.data_of, Origin)
            note = Note(folder="" if shared else manifest.folder, needs=needs_of(manifest))
            self._facts[version] = _Facts(manifest.kind, manifest.created, note)
        return self._facts[version]

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for entry in self._store.list(DATA):
            folder = "/".join(entry.path.split("/")[:2])
            sizes[folder] = sizes.get(folder, 0) + entry.size
        return sizes

    def _end(self, clock: StoreClock, renew: Callable[[], None]) -> list[VersionId]:
        """Delete the manifests of what may go, newest first: no version is ever there without what it needs."""
        survey = self._survey(clock)
        plan = survey.plan(self.policy, held(self._store, clock))
        self._withdraw(version for version in collected_versions(self._store) if version in plan.keep)
        for version in plan.go:
            renew()
            put_bytes(self._store, collected_path(version), canonical(msgspec.to_builtins(self._facts[version].note)))
        if not plan.go:
            return []
        # Again, after the notes: who pins or leases a version now sees its note. Holders before manifests, since a
        # rollback that lets go of its lease has committed a version by then that needs what was leased.
        holders, ended = held(self._store, clock), list[VersionId]()
        keep = set(self._survey(clock).plan(self.policy, holders).keep)
        notes = {version: facts.note for version, facts in self._facts.items()}
        for version in plan.go:
            renew()
            if version in keep:
                continue
            if self._delete(manifest_path(version)):
                ended.append(version)
            else:
                keep |= _with_needs([version], notes)
        self._withdraw(version for version in plan.go if version in keep)
        return ended

    def _withdraw(self, versions: Iterable[VersionId]) -> None:
        for version in list(versions):
            self._delete(collected_path(version))

    # -- data --------------------------------------------------------------------------------------------------

    def _bury(self, clock: StoreClock, renew: Callable[[], None]) -> tuple[int, int, int]:
        """Delete the data of versions that ended: files, their bytes, and the versions that have to wait."""
        noted = {v: entry for entry in self._store.list(COLLECTED) if (v := version_of(entry.path)) is not None}
        self._notes = {v: note for v, note in self._notes.items() if v in noted}  # others may have finished theirs
        there = set(self.channel.committed())
        ended = {v: note for v in sorted(noted) if v not in there and (note := self._note(v)) is not None}
        needed = _with_needs(held(self._store, clock), ended)
        files = nbytes = waiting = 0
        for version, note in ended.items():
            if version in needed or clock.age(noted[version].modified) < self.policy.grace:
                waiting += 1
                continue
            gone, whole = self._delete_folder(note.folder, renew)
            files, nbytes = files + len(gone), nbytes + sum(entry.size for entry in gone)
            if whole and self._delete(collected_path(version)):
                self._notes.pop(version)
            else:
                waiting += 1
        return files, nbytes, waiting

    def _note(self, version: VersionId) -> Note | None:
        """None if somebody finished the version meanwhile."""
        path = collected_path(version)
        try:
            if version not in self._notes:
                self._notes[version] = msgspec.json.decode(read_bytes(self._store, path, 1 << 20), type=Note)
        except NotFound:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadManifest(f"{self._store.url}/{path} cannot be read: {error}") from error
        note = self._notes[version]
        if note.folder and not re.fullmatch(rf"{DATA}/{version.stem}-[^/]+", note.folder):
            raise BadManifest(f"{self._store.url}/{path} names {note.folder!r}, which is not a folder of {version}")
        return note

    def _delete_folder(self, folder: str, renew: Callable[[], None]) -> tuple[list[Entry], bool]:
        """The files that are deleted, and whether that is all of them. The copy of the manifest goes first, so that
        nobody takes what is left for a whole version whose manifest was lost."""
        found = self._store.list(folder) if folder else ()
        entries = sorted(found, key=lambda entry: not entry.path.endswith(f"/{SELF_COPY}"))
        gone = []
        for entry in entries:
            renew()
            if self._delete(entry.path):
                gone.append(entry)
        return gone, len(gone) == len(entries)

    def _delete(self, path: str) -> bool:
        """Whether the store let go of it. StoreUnavailable is raised: it costs its full timeout for each file."""
        try:
            self._store.delete(path)
        except NotFound:
            return True
        except StoreUnavailable:
            raise
        except StoreError as error:
            if path not in self._refused:
                log.warning("%s cannot be deleted and stays: %s", path, error, extra={"event": "not-deleted"})
            self._refused.add(path)
            return False
        return True


def _with_needs(versions: Iterable[VersionId], notes: Mapping[VersionId, Note]) -> set[VersionId]:
    """Those of the versions that are in `notes`, and what they are made from, as far as it is there too."""
    found: set[VersionId] = set()
    open_ends = list(versions)
    while open_ends:
        version = open_ends.pop()
        if version in notes and version not in found:
            found.add(version)
            open_ends += notes[version].needs
    return found
