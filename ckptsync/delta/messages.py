"""What ranks send each other of a tensor under a DeltaPolicy: only what changed since the last committed version.

A rank compares its own box of a tensor with its own copy from then, before anything is gathered; the rank that writes
puts the changes into its copy of the whole. Both copies are of one version, and move when the next is committed. A box
on a GPU is compared there, if that is asked for, with a copy there: only the changes come to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

import numpy as np
import torch

from ..export.pieces import Box
from ..shards.tensors import tensor_bytes
from .baseline import Baseline, Key
from .codec import apply, encode, parse
from .device import Changes, DeviceBaseline
from .layout import Bytes
from .reference import U8

Place = tuple[str, Box]


def is_far(tensor: torch.Tensor) -> bool:
    """Whether the host does not have it."""
    return tensor.is_cuda


class Messages:
    """One rank's side, of one track at a time: `begin`, `compare`, then `outgoing` and `incoming`, then `commit`.

    `on_gpu`: compare there what lies there.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._sent: dict[Place, U8] = {}
        self._pending: dict[Place, U8 | bytes | None] = {}
        self._whole: Baseline | None = None
        self._keys: Mapping[str, Key] = {}
        self._pool: Executor | None = None
        self._far = Far() if on_gpu else None

    def begin(self, whole: Baseline | None, keys: Mapping[str, Key], pool: Executor | None = None) -> None:
        """`whole`: what this rank has of the version that is compared with; None where there is none, and everything
        is sent. `keys`: under which key it has each tensor of the model. `pool`: threads that compress."""
        self._whole, self._keys, self._pending, self._pool = whole, keys, {}, pool
        if whole is None:
            self._sent = {}

    def compare(self, boxes: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """All boxes that this rank is about to send, or to write itself; those on a GPU are compared now."""
        if self._far is not None:
            known = {(name, box): local for name, box, local in boxes if name in self._keys and is_far(local)}
            self._far.begin(known, self._whole is not None, self._pool)

    def is_known(self, name: str, box: Box) -> bool:
        """Whether it was compared where it lies, so that it need not come to the host."""
        return self._far is not None and (name, box) in self._far.known

    def outgoing(self, name: str, box: Box, local: torch.Tensor) -> tuple[bool, torch.Tensor]:
        """Whether it is a change, and the bytes to send; none if the box did not change."""
        place = (name, box)
        if self._far is not None and place in self._far.known:
            blob = self._far.known[place]
            if blob is None or len(blob) < local.nbytes:
                return True, _message(blob)
            return False, _message(tensor_bytes(local.cpu()))
        data = tensor_bytes(local.cpu())
        before = self._sent.get(place)
        if before is None or name not in self._keys:
            return False, self._whole_box(place, data)
        blob = encode(before.data, data, _size(local.dtype), effort="fast")
        if blob is not None and len(blob) >= data.nbytes:
            return False, self._whole_box(place, data)
        self._pending[place] = blob
        return True, _message(blob)

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
        if self._far is not None:
            for place in self._far.known:
                self._sent.pop(place, None)  # of an older version from now on
            self._far.commit()


class Far:
    """What a rank has of its boxes of the last committed version where they lie, on a GPU: `begin`, then `commit`."""

    def __init__(self) -> None:
        self.known: Mapping[Place, Bytes | None] = {}
        """The change of each box that was compared; None if there is none."""
        self._held: DeviceBaseline | None = None
        self._fresh: DeviceBaseline | None = None
        self._changes: Changes | None = None

    def begin(self, boxes: Mapping[Place, torch.Tensor], comparable: bool, pool: Executor | None) -> None:
        """Nothing is known unless `comparable`; then what is there now is copied, to be compared with next."""
        tensors, self.known, self._changes, self._fresh = _by_text(boxes), {}, None, None
        if comparable and self._held is not None and self._held.names == tensors.keys():
            self._changes = self._held.encode(tensors, effort="fast", pool=pool)
            self.known = dict(zip(boxes, map(self._changes.blobs.get, tensors), strict=True))
        else:
            self._held = None  # let go first
            self._fresh = DeviceBaseline(tensors) if tensors else None

    def commit(self) -> None:
        """What was begun is committed."""
        if self._held is not None and self._changes is not None:
            self._held.move(self._changes)
        self._held, self._fresh, self._changes = self._fresh or self._held, None, None


def _by_text(boxes: Mapping[Place, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}{list(box.offset)}{list(box.shape)}": local for (name, box), local in boxes.items()}


def _message(data: Bytes | None) -> torch.Tensor:
    return torch.from_numpy(np.array(np.frombuffer(data or b"", dtype=np.uint8)))


def _size(dtype: torch.dtype) -> int:
    return min(4, dtype.itemsize)


def _size_of(blob: bytes) -> int:
    """The element size that a blob of ours says."""
    return blob[8]
