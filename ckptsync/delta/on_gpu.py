"""A publish whose tensors are on a GPU: they are compared there, and the host has them from what changed.

The host keeps its own copy of the version before (`baseline`), for the digests of files and tensors and for readers
that are further behind. Both copies are of one version, and move when the next is committed. What the host makes of its
copy is proven block by block, by digests that the GPU took of the weights themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ..export.source import Walk
from ..export.stream import Item, Named, Shares, to_wire
from ..manifest import Parent
from ..release import Release
from ..shards.tensors import TORCH_DTYPES
from . import messages
from .baseline import Baseline, Key, change
from .codec import Effort
from .device import Changes, DeviceBaseline
from .layout import Bytes

Known = Mapping[Key, Bytes | None]
"""The change of each tensor that was compared; None if there is none."""


class OnGpu:
    """What a single process has of the last committed version on its GPU: `begin`, then `commit`.

    Without `commit` the copy is not used again, and made anew at the next version.
    """

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._held: DeviceBaseline | None = None
        self._version: Parent | None = None
        self._changes: Changes | None = None

    def begin(self, release: Release, base: Baseline | None, pool: Executor) -> tuple[Release, Known]:
        """The release with tensors that come out of `base` and their changes, and those changes.

        Where there is nothing to compare with (`base` is None, or of another version than the copy here) the release
        is as it was, nothing is known, and what is published now is copied to be compared with next.
        """
        tensors = {key: _on_wire(item, release) for key, item in _items(release).items()}
        version, self._version, self._changes = self._version, None, None
        if (
            base is None
            or version != base.version
            or self._held is None
            or self._held.names != set(map(_name, tensors))
        ):
            self._held = None  # let go first
            self._held = DeviceBaseline({_name(key): tensor for key, tensor in tensors.items()}) if tensors else None
            return release, {}
        found = self._held.encode({_name(key): t for key, t in tensors.items()}, effort=self._effort, pool=pool)
        self._changes = found
        known = {key: found.blobs.get(_name(key)) for key in tensors}
        return _rebuilt(release, base, known), known

    def commit(self, version: Parent) -> None:
        """What was begun is committed as `version`."""
        if self._held is not None and self._changes is not None:
            self._held.move(self._changes)
        if self._held is not None and self._effort == "best":
            self._held.prepare()
        self._version, self._changes = version, None


def _name(key: Key) -> str:
    return "/".join(key)


def _items(release: Release) -> dict[Key, Item]:
    """What is compared on the GPU: whole tensors that are written as they are."""
    return {
        _key(assignment.walk, item): item
        for assignment in release.assignments
        for item in assignment.walk.items or ()
        if release.config.transform is None
        and item.outputs
        and isinstance(item.weight, torch.Tensor)
        and not isinstance(item.weight, DTensor)
        and messages.is_far(item.weight)
        and item.nbytes
    }


def _key(walk: Walk, item: Item) -> Key:
    return walk.track, item.outputs[0][1].name if item.outputs else ""


def _on_wire(item: Item, release: Release) -> torch.Tensor:
    return cast(torch.Tensor, to_wire(item.weight, release.config.dtype))


def _rebuilt(release: Release, base: Baseline, known: Known) -> Release:
    """The same release, whose known tensors are made on the host."""

    def walked(walk: Walk) -> Walk:
        def open_(shares: Shares, *given: object) -> Iterator[Named]:
            for rank, share in shares.items():
                for item in share:
                    key = _key(walk, item)
                    if key in known:
                        yield key[1], _tensor(item, base, key, known[key])
                    else:
                        yield from plain({rank: [item]}, *given)

        plain = cast(partial[Iterator[Named]], walk.open)
        return dataclasses.replace(walk, open=open_)

    assignments = [dataclasses.replace(each, walk=walked(each.walk)) for each in release.assignments]
    return dataclasses.replace(release, assignments=assignments)


def _tensor(item: Item, base: Baseline, key: Key, blob: Bytes | None) -> torch.Tensor:
    """The tensor as it is on the GPU. BadShard if it would become another."""
    image, ((_, spec),) = np.array(base.tensors[key]), item.outputs or ()
    if blob is not None:
        change(image, blob, spec)
    return torch.from_numpy(image).view(TORCH_DTYPES[spec.dtype]).view(tuple(item.weight.shape))
