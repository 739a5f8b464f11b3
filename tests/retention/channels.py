"""A channel with versions of a few hundred bytes, and what is left of it."""

from __future__ import annotations

from typing import Any

from ckptsync.channel import Channel
from ckptsync.collect import Collected, Collector
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import Manifest, Parent
from ckptsync.retention import Retention
from ckptsync.store import put_bytes
from ckptsync.store.base import Store
from ckptsync.version import VersionId
from tests.core.manifests import manifest, tensor, track

FILES = 3
"""In a version's data folder."""


class Trainer:
    """One attempt that publishes."""

    def __init__(self, channel: Channel, resumed_from: VersionId | None = None) -> None:
        self.channel = channel
        self.epoch = channel.claim_epoch("run", resumed_from)

    def publish(self, *numbers: int, **fields: Any) -> list[VersionId]:
        """Full versions of these numbers, unless `fields` say otherwise."""
        return [self._publish(number, fields).id for number in numbers]

    def publish_deltas(self, *numbers: int) -> list[VersionId]:
        """Each against the number before."""
        return [self.publish(number, kind="delta", parent=self._parent(number - 1))[0] for number in numbers]

    def _parent(self, number: int) -> Parent:
        digest = self.channel.manifest(VersionId(self.epoch.number, number)).content_digest
        return Parent(epoch=self.epoch.number, number=number, content_digest=digest)

    def _publish(self, number: int, fields: dict[str, Any]) -> Manifest:
        tracks = {"model": track(tensor(value=number.to_bytes(8, "big")), size=100)}
        row = {"channel_id": self.channel.channel_id, "run_id": "run", "tracks": tracks, **fields}
        made = manifest(self.epoch.number, number, **row)
        for name in ("model.safetensors", "config.json", SELF_COPY):
            put_bytes(self.channel.store, f"{made.folder}/{name}", bytes(100))
        return self.channel.commit(self.epoch, made)


def collect(store: Store, keep_last: int = 2, **policy: Any) -> Collected:
    """One run of a fresh collector, by which data may go at once."""
    return Collector(Channel.open(store), Retention(**{"keep_last": keep_last, "grace": 0.0, **policy})).collect()


def numbers(store: Store) -> list[int]:
    """Of the versions that are there."""
    return [version.number for version in Channel.open(store).committed()]


def with_data(store: Store) -> dict[int, int]:
    """Number -> how many files its data folder holds."""
    found: dict[int, int] = {}
    for entry in store.list("data"):
        number = int(entry.path.split("/")[1].split("-")[1][1:])
        found[number] = found.get(number, 0) + 1
    return found


def notes(store: Store) -> list[str]:
    return sorted(entry.path for entry in store.list("collected"))
