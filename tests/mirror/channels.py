"""A channel with all that a trainer may publish, made once, and what two roots are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckptsync import Channel, DeltaPolicy, Mirror, Publisher
from ckptsync.digest import digest
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import FileEntry, Parent, Track
from ckptsync.rollback import roll_back
from ckptsync.signing import Signer
from ckptsync.store import LocalStore
from ckptsync.store.base import Store, put_bytes, read_bytes
from ckptsync.version import VersionId
from tests.core.manifests import manifest, tensor
from tests.delta.test_versions import model, step
from tests.lora.models import TinyLM, with_adapter

NOT_MIRRORED = ("receipts/", "leases/", "pins/", "collected/", "collector/", "head.json", "mirror.json", "sent.json")


def publish_all_kinds(root: str | Store, **settings: Any) -> None:
    """Epoch 1: full and two deltas. Epoch 2: two tracks, an adapter, one with trainer state. Epoch 3: a rollback to a
    delta."""
    state = model()
    with Publisher(root, delta=DeltaPolicy(), **settings) as trainer:
        for seed in range(3):
            trainer.publish(state, step=seed)
            step(state, seed=seed + 1)
    with Publisher(root, **settings) as trainer:
        trainer.publish(tracks={"actor": dict(state), "draft": {"w": torch.ones(3)}}, step=3)
        trainer.publish(with_adapter(TinyLM(), seed=1, task_type=None), kind="adapter")
        trainer.publish(state, trainer_state={"optimizer": {"m": torch.zeros(5)}, "step": 4})
    channel = Channel.open(root, sign_key=settings.get("sign_key"))
    roll_back(channel, channel.resolve("e1-v3"))


def bytes_of(store: Store) -> dict[str, bytes]:
    """Path -> content, of all that a mirror copies."""
    paths = [entry.path for entry in store.list("") if not entry.path.startswith(NOT_MIRRORED)]
    return {path: read_bytes(store, path, 1 << 30) for path in paths}


def source_of(folder: Path, *numbers: int) -> LocalStore:
    """A channel with these versions of a `Trainer`."""
    store = LocalStore(str(folder))
    Trainer(store).publish(*numbers)
    return store


def copy_of(source: Store, folder: Path) -> LocalStore:
    """Its mirror."""
    store = LocalStore(str(folder))
    Mirror(source, store).run()
    return store


class Trainer:
    """One attempt that publishes versions of one small file, which is what its manifest says."""

    def __init__(
        self, root: str | Store, resumed_from: VersionId | None = None, sign_key: Signer | None = None, **trust: Any
    ) -> None:
        self.channel = Channel.create(root, sign_key=sign_key, **trust)
        self.epoch = self.channel.claim_epoch("run", resumed_from)

    def publish(self, *numbers: int, **fields: Any) -> VersionId:
        for number in numbers:
            self._publish(number, fields)
        return VersionId(self.epoch.number, number)

    def publish_delta(self, number: int) -> VersionId:
        """Against the number before. What its file holds is nobody's concern here."""
        before = self.channel.manifest(VersionId(self.epoch.number, number - 1))
        parent = Parent(epoch=before.epoch, number=before.number, content_digest=before.content_digest, stored=(SHARD,))
        return self.publish(number, kind="delta", parent=parent)

    def _publish(self, number: int, fields: dict[str, Any]) -> None:
        data, algorithm = content(number), "blake3" if self.channel.signer else "xxh3-128"
        files = (FileEntry(name=SHARD, size=len(data), digest=digest(data, algorithm)),)
        tracks = {"model": Track(files=files, tensors=(tensor(value=number.to_bytes(8, "big")),))}
        row = {"channel_id": self.channel.channel_id, "run_id": "run", "tracks": tracks, "digest": algorithm}
        made, _ = self.channel.seal(manifest(self.epoch.number, number, **{**row, **fields}))
        put_bytes(self.channel.store, f"{made.folder}/{SHARD}", data)
        put_bytes(self.channel.store, f"{made.folder}/{SELF_COPY}", made.encoded)
        self.channel.commit(self.epoch, made)


SHARD = "model.safetensors"


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * 25_000


def numbers(root: str | Store) -> list[int]:
    """Of the versions that are there."""
    return [version.number for version in Channel.open(root).committed()]
