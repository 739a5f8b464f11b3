"""Small worlds for the explorer: the product's own publishers, collectors and readers on one store, and what must
hold there.

Every world starts from a store, lets a few actors loose on it, and is looked at after each change. The first versions
of a channel are published once and shared by all runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
import torch

from ckptsync import holds
from ckptsync.channel import Channel
from ckptsync.collect import Collector
from ckptsync.epochs import claimed
from ckptsync.errors import Conflict, Fenced, VersionExists, VersionGone, VersionNotFound
from ckptsync.layout import EPOCHS, MANIFESTS, manifest_path
from ckptsync.manifest import Manifest, decode, seal
from ckptsync.publish import Publisher
from ckptsync.retention import Retention
from ckptsync.rollback import roll_back
from ckptsync.store.base import Store, put_bytes
from ckptsync.sweep import sweep_debris
from ckptsync.testing.explore import Actor
from ckptsync.testing.memory import MemoryStore
from ckptsync.verify import verify_version
from ckptsync.version import VersionId

NOTHING: Mapping[str, bytes] = {}


@functools.cache
def published(*values: float) -> Mapping[str, bytes]:
    """The files of a channel with versions of these weights, all of one epoch."""
    store = MemoryStore()
    with Publisher(store) as publisher:
        for value in values:
            publisher.publish(weights(value))
    return store.files


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), float(value))}


class World:
    """Actors are added by `let`; what they find out is checked at the end."""

    def __init__(self, files: Mapping[str, bytes] = NOTHING, store: type[MemoryStore] = MemoryStore) -> None:
        self.store = store(files)
        self.actors: dict[str, Actor] = {}
        self.succeeded: dict[VersionId, str] = {}
        """Version -> content digest, as whoever published it was told."""

        self.seen: dict[str, list[VersionId]] = {}
        """What each reader took for the newest, in order."""

        self.promised: set[VersionId] = set()
        """What somebody holds, having been told that it stays."""

        self._records: dict[str, bytes] = {}
        self._whole: dict[str, Manifest] = {}

    def let(self, name: str, actor: Actor) -> World:
        self.actors[name] = actor
        return self

    # -- actors --------------------------------------------------------------------------------------------------

    def publish(
        self, *values: float, resumed_from: VersionId | None = None, through: Callable[[Store], Store] = lambda s: s
    ) -> Actor:
        """A trainer attempt with one version for each value. It may be fenced at any time."""

        def act(store: Store) -> None:
            with suppress(Fenced), Publisher(through(store), resumed_from=resumed_from) as publisher:
                for value in values:
                    newer = max(claimed(self.store)) > publisher.epoch  # not through `store`: looking is no step
                    done = publisher.publish(weights(value))
                    assert not newer, f"{done.version} was published after a newer epoch had been claimed"
                    self.succeeded[done.version] = done.content_digest

        return act

    def commit(self, version: VersionId, value: float) -> Actor:
        """A version of an epoch that somebody else may hold as well: a copy of a trainer that was thought dead."""

        def act(store: Store) -> None:
            channel = Channel.open(store)
            epoch = channel.claims()[version.epoch]
            assert epoch is not None
            sealed, files = _made(version, value, channel.channel_id)
            for path, data in files.items():
                put_bytes(store, path, data)
            with suppress(VersionExists, Fenced):
                found = channel.commit(epoch, sealed)
                self.succeeded[found.id] = found.content_digest

        return act

    def follow(self, times: int) -> Actor:
        """A reader of `latest` that checks every byte of what it finds."""

        def act(store: Store) -> None:
            channel = Channel.open(store)
            seen = self.seen.setdefault("follow", [])
            for _ in range(times):
                if (version := channel.poll()) is not None:
                    seen.append(version)
                    self._read(channel, version)

        return act

    def lease_and_read(self, version: VersionId) -> Actor:
        """A reader that is told whether its lease came in time; if so, every byte stays."""

        def act(store: Store) -> None:
            channel = Channel.open(store)
            channel.lease("reader", version, 3600.0)
            with suppress(VersionGone):
                holds.check_not_collected(channel, version)
                self.promised.add(version)
                self._is_kept(channel, version)

        return act

    def pin(self, version: VersionId) -> Actor:
        def act(store: Store) -> None:
            with suppress(VersionGone, VersionNotFound):
                holds.pin(Channel.open(store), version, "kept")
                self.promised.add(version)

        return act

    def collect(self, keep_last: int = 2) -> Actor:
        def act(store: Store) -> None:
            with suppress(Conflict):
                Collector(Channel.open(store), Retention(keep_last=keep_last, grace=0.0)).collect()

        return act

    def go_back(self, version: VersionId) -> Actor:
        def act(store: Store) -> None:
            channel = Channel.open(store)
            with suppress(VersionGone, VersionNotFound, Fenced):
                done = roll_back(channel, channel.manifest(version))
                self.succeeded[done.id] = done.content_digest

        return act

    def sweep(self) -> Actor:
        """A new attempt that clears up after older ones, without any grace."""

        def act(store: Store) -> None:
            channel = Channel.create(store)
            sweep_debris(channel, channel.claim_epoch("sweeper"), grace=-1e9)

        return act

    def _is_kept(self, channel: Channel, version: VersionId) -> None:
        try:
            problems = verify_version(channel, version).problems
        except VersionNotFound as error:
            raise AssertionError(f"{version} is held and was deleted") from error
        assert not problems, f"{version} is held and is not whole: {problems}"

    def _read(self, channel: Channel, version: VersionId) -> None:
        """Every byte, or the version was collected meanwhile."""
        try:
            report = verify_version(channel, version)
        except VersionNotFound:
            return
        if not report.ok:
            with suppress(VersionGone):
                channel.check_still_there(version)
                raise AssertionError(f"{version} is there and is not whole: {report.problems}")

    # -- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._nothing_committed_was_written_again()
        self._every_manifest_has_its_files()

    def end(self) -> None:
        self._every_success_is_there()
        self._the_newest_attempt_has_the_last_word()
        for seen in self.seen.values():
            assert seen == sorted(seen), f"a reader went back: {seen}"
        for version in self.promised:
            self._is_kept(Channel.open(self.store), version)

    def _nothing_committed_was_written_again(self) -> None:
        for path, data in self.store.files.items():
            if path.startswith((f"{MANIFESTS}/", f"{EPOCHS}/")):
                assert self._records.setdefault(path, data) == data, f"{path} was written again"

    def _every_manifest_has_its_files(self) -> None:
        """Of the live ones: what a frozen trainer commits after a newer one has swept is dead on arrival."""
        for version in Channel.open(self.store).versions():
            path = manifest_path(version)
            if path not in self._whole:
                self._whole[path] = decode(self.store.files[path], expect=version)
            manifest = self._whole[path]
            for name, file in manifest.files():
                found = self.store.files.get(f"{manifest.folder}/{name}")
                assert found is not None, f"{path} is committed and {name} is not there"
                assert len(found) == file.size, f"{path} is committed and {name} is torn"

    def _every_success_is_there(self) -> None:
        channel = Channel.open(self.store)
        for version, content in self.succeeded.items():
            with suppress(VersionNotFound):  # collected
                found = channel.manifest(version).content_digest
                assert found == content, f"{version} was published as {content} and is {found}"

    def _the_newest_attempt_has_the_last_word(self) -> None:
        """If the newest attempt published, that is what followers of `latest` see in the end."""
        newest_epoch = max(claimed(self.store), default=0)
        if mine := [version for version in self.succeeded if version.epoch == newest_epoch]:
            newest = Channel.open(self.store).latest().id
            assert newest >= max(mine), f"{newest} is the newest, though {max(mine)} was published after it"
        found = Channel.open(self.store).poll()
        assert found is None or found == Channel.open(self.store).latest().id, f"a reader that comes now gets {found}"


def _made(version: VersionId, value: float, channel_id: str) -> tuple[Manifest, dict[str, bytes]]:
    """A version with the weights `value`, and its files."""
    store = MemoryStore(published(value))
    made = Channel.open(store).latest()
    new = msgspec.structs.replace(made, channel_id=channel_id, number=version.number, nonce=f"{value:032.0f}")
    sealed, _ = seal(new)
    return sealed, {f"{sealed.folder}/{name}": store.files[f"{made.folder}/{name}"] for name, _ in made.files()}
