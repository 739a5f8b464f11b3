"""Version 0: the base model, recorded before training, so that an engine on base weights has a truthful label."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike

import torch

from .channel import Channel
from .digest import digest
from .errors import InvalidInput, VersionExists
from .export.source import CheckpointSource
from .manifest import Manifest, TensorEntry, content_digest
from .preflight import check_space
from .publish import Publisher
from .shards.tensors import spec_of, tensor_bytes
from .signing import Signer
from .store.base import Store
from .version import VersionId

NUMBER = 0
"""Kept for the base model; a trainer's versions begin at 1."""


def publish_base(
    root: str | PathLike[str] | Store, hf_dir: str, *, run_id: str = "", sign_key: str | Signer | None = None
) -> VersionId:
    """Record the Hugging Face folder `hf_dir` as version 0 of a channel that has no version yet.

    Call it in one process, before the trainer's Publisher: it claims an epoch of its own, and the trainer's epoch
    goes on from it with number 1. May be called at every start: a base that is there already is compared with the
    folder, which reads the folder once, and is left alone. Copies the weights, so that the channel is whole by
    itself when the folder is gone. `sign_key`: as in PublisherConfig.

    Raises VersionExists if the channel has another base, InvalidInput if it has versions and no base, NotFound or
    BadShard if the folder is no whole checkpoint, StoreFull before an epoch is claimed if there is no room for it.
    """
    source, channel = CheckpointSource(hf_dir), Channel.open(root)
    if (found := _recorded(channel)) is not None:
        if found.content_digest != _content(source, found.digest):
            raise VersionExists(f"{found.id} is another base model than {hf_dir}: use a root of its own for each")
        return found.id
    check_space(channel.store, sum(spec.nbytes for spec in source.metadata()))
    with Publisher(root, run_id=run_id, sign_key=sign_key) as publisher:
        return publisher.publish(source, number=NUMBER, assets=hf_dir).version


def _recorded(channel: Channel) -> Manifest | None:
    committed = channel.committed()
    base = [version for version in committed if version.number == NUMBER]
    if base:
        return channel.manifest(base[-1])
    if committed:
        raise InvalidInput(
            f"{channel.store.url} has versions up to {committed[-1]} and no base: version 0 comes before them all"
        )
    return None


def _content(tensors: Iterable[tuple[str, torch.Tensor]], algorithm: str) -> str:
    entries = []
    for name, tensor in tensors:
        spec = spec_of(name, tensor)
        entries.append(
            TensorEntry(name=name, dtype=spec.dtype, shape=spec.shape, digest=digest(tensor_bytes(tensor), algorithm))
        )
    return content_digest(entries)
