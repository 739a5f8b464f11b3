"""What ranks send each other of a tensor under a DeltaPolicy: only what changed since the last committed version.

A rank compares its own box of a tensor with its own copy from then, before anything is gathered; the rank that writes
puts the changes into its copy of the whole. Both copies are of one version, and move when the next is committed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ..export.pieces import Box
from ..shards.tensors import tensor_bytes
from .baseline import Baseline, Key
from .codec import apply, encode, parse
from .reference import U8

Place = tuple[str, Box]


class Messages:
    """One rank's side, of one track at a time: `begin`, then `outgoing` and `incoming`, then `commit`."""

    def __init__(self) -> None:
        self._sent: dict[Place, U8] = {}
        self._pending: dict[Place, U8 | bytes | None] = {}
        self._whole: Baseline | None = None
        self._keys: Mapping[str, Key] = {}

    def begin(self, whole: Baseline | None, keys: Mapping[str, Key]) -> None:
        """`whole`: what this rank has of the version that is compared with; None where there is none, and everything
        is sent. `keys`: under which key it has each tensor of the model."""
        self._whole, self._keys, self._pending = whole, keys, {}
        if whole is None:
            self._sent = {}

    def outgoing(self, name: str, box: Box, local: torch.Tensor) -> tuple[bool, torch.Tensor]:
        """Whether it is a change, and the bytes to send; none if the box did not change."""
        data, place = tensor_bytes(local), (name, box)
        before = self._sent.get(place)
        if before is None or name not in self._keys:
            return False, self._whole_box(place, data)
        blob = encode(before.data, data, _size(local.dtype), effort="fast")
        if blob is not None and len(blob) >= data.nbytes:
            return False, self._whole_box(place, data)
        self._pending[place] = blob
        return True, torch.from_numpy(np.array(np.frombuffer(blob or b"", dtype=np.uint8)))

    def _whole_box(self, place: Place, data: memoryview) -> torch.Tensor:
        raw = np.array(np.frombuffer(data, dtype=np.uint8))
        self._pending[place] = raw
        return torch.from_numpy(raw)

    def incoming(self, name: str, box: Box, like: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """The box as it is now, from a change against what this rank has of the whole tensor; `like` is the whole."""
        if self._whole is None:
            raise RuntimeError("a change came without a version that it is against")
        whole = torch.from_numpy(self._whole.tensors[self._keys[name]]).view(like.dtype).view(like.shape)
        part = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        found = whole[part].clone(memory_format=torch.contiguous_format)
        if len(message):
            size, image = _size(like.dtype), tensor_bytes(found)
            apply(parse(message.numpy().data, size, image.nbytes // size), image)
        return found

    def commit(self) -> None:
        """What was sent is committed."""
        for place, change in self._pending.items():
            if isinstance(change, np.ndarray):
                self._sent[place] = change
            elif change is not None:
                data = self._sent[place]
                size = _size_of(change)
                apply(parse(change, size, data.nbytes // size), data.data)
        self._pending = {}


def _size(dtype: torch.dtype) -> int:
    return min(4, dtype.itemsize)


def _size_of(blob: bytes) -> int:
    """The element size that a blob of ours says."""
    return blob[8]
