"""Attempts that can be killed in this process, for `lifecycle`: what they do after their death has no effect."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..delta.policy import DeltaPolicy
from ..digest import digest
from ..manifest import TensorEntry, content_digest
from ..publish import Publisher
from ..shards.tensors import spec_of, tensor_bytes
from ..store.base import Entry, Store
from ..version import VersionId
from .hooks import CHANGES, HookedStore

Weights = dict[str, torch.Tensor]


class Killed(BaseException):
    """Nothing that the process does after it has an effect."""


class Life:
    """Hook: raises Killed before each change from the `left`-th on, counted from 0; None: never."""

    def __init__(self, left: int | None = None) -> None:
        self.left = left

    def __call__(self, operation: str, _path: str) -> None:
        if self.left is None or operation not in CHANGES:
            return
        if self.left == 0:
            raise Killed
        self.left -= 1


class Timeless(HookedStore):
    """Tells no times, as some object stores do not: nothing in a life depends on how long it takes."""

    def list(self, folder: str) -> Iterator[Entry]:
        return iter([Entry(entry.path, entry.size, 0.0) for entry in super().list(folder)])


class Trainer:
    """One attempt, in a process that may be killed. `weights` are what it has trained so far."""

    def __init__(self, store: Store, resumed_from: VersionId | None, weights: Weights, deltas: bool) -> None:
        self.life, self.weights = Life(), weights
        self._store, self._resumed_from = HookedStore(store, self.life), resumed_from
        self._policy = DeltaPolicy(anchor_every=4, skip=(2,)) if deltas else None

    def start(self) -> None:
        self.publisher = Publisher(
            self._store, resumed_from=self._resumed_from, delta=self._policy, sweep_after=None, shard_bytes=600
        )

    def train(self, step: int) -> None:
        """A small change, to some of the weights."""
        for at, tensor in enumerate(self.weights.values()):
            if (step + at) % 2 == 0:
                tensor.view(-1)[step % tensor.numel()] = float(step)


def first_weights() -> Weights:
    return {f"layers.{n}.weight": torch.zeros(8, 8) for n in range(3)}


def content_of(weights: Weights) -> str:
    specs = [(spec_of(name, tensor), tensor) for name, tensor in weights.items()]
    return content_digest(
        TensorEntry(name=spec.name, dtype=spec.dtype, shape=spec.shape, digest=digest(tensor_bytes(tensor)))
        for spec, tensor in specs
    )
