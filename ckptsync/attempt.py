"""The data folder of one publish in the making: what was written so far, and how to take it away again."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from .digest import digest
from .errors import CkptSyncError, InvalidInput
from .manifest import FileEntry, TensorEntry, TensorSpec, data_folder
from .shards.index import INDEX_NAME, index_bytes
from .shards.plan import ShardPlan, plan_shards
from .shards.tensors import spec_of, tensor_bytes
from .shards.write import ShardWriter
from .store.base import Store, put_bytes
from .version import VersionId

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

T = TypeVar("T")
Named = tuple[str, "torch.Tensor"]


class Stopwatch:
    """Seconds by phase."""

    def __init__(self, *phases: str) -> None:
        self.seconds = dict.fromkeys(phases, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def over(self, phase: str, items: Iterator[T]) -> Iterator[T]:
        """The same items; the time that they take to come is the phase's."""
        while True:
            with self(phase):
                item = next(items, None)
            if item is None:
                return
            yield item
            del item


class Attempt:
    """Writes files into a data folder of its own. Only the manifest makes them a version."""

    def __init__(
        self,
        store: Store,
        version: VersionId,
        *,
        algorithm: str,
        watch: Stopwatch,
        progress: Callable[[int], None],
    ) -> None:
        self.version = version
        self.nonce = uuid.uuid4().hex
        self.may_exist = False
        """Whether a manifest may name these files by now: then they must not be deleted."""

        self.files: list[FileEntry] = []
        self.tensors: dict[str, TensorEntry] = {}
        self._store, self._folder, self._algorithm = store, data_folder(version, self.nonce), algorithm
        self._watch, self._progress = watch, progress
        self._paths: list[str] = []
        self._plans: list[ShardPlan] = []

    def put(self, name: str, data: bytes) -> None:
        """One small file beside the shards, listed in the manifest."""
        self.put_unlisted(name, data)
        self.files.append(FileEntry(name=name, size=len(data), digest=digest(data, self._algorithm)))

    def put_unlisted(self, name: str, data: bytes) -> None:
        """A file that the manifest cannot list: its own copy."""
        with self._watch("write"):
            put_bytes(self._store, self._path(name), data)

    def write_planned(self, tensors: Iterator[Named], plans: Sequence[ShardPlan]) -> None:
        """Stream `tensors` into the shards planned from their specs; holds one tensor at a time.

        A tensor that comes before its place in the file is held until then: a plan puts larger elements first
        where the walk order would misalign them.
        """
        for plan in plans:
            self._write_shard(plan, tensors)
        if (extra := next(tensors, None)) is not None:
            raise InvalidInput(f"the source yields {extra[0]!r}, which its metadata does not announce")

    def write_unplanned(self, tensors: Iterator[Named], shard_bytes: int) -> None:
        """Stream `tensors` of unknown number; holds one shard. Files are numbered without "of N"."""
        held: dict[str, torch.Tensor] = {}
        size = 0
        for name, tensor in tensors:
            held[name] = tensor
            size += tensor.nbytes
            if size > shard_bytes:
                self._write_held(held, shard_bytes, first_only=True)
                size = sum(left.nbytes for left in held.values())
            del tensor
        self._write_held(held, shard_bytes)

    def write_index(self) -> None:
        """`model.safetensors.index.json`, after the shards."""
        self.put(INDEX_NAME, index_bytes(self._plans))

    def discard(self) -> None:
        """Delete this attempt's files, best effort; what stays is swept by a later epoch. Logs a failure.

        Stops at the first failure, since a store that is down costs its full timeout for each file.
        """
        try:
            for path in self._paths:
                self._store.delete(path)
        except CkptSyncError as error:
            log.warning("%s was not cleaned up and is left to be swept: %s", self._folder, error)

    # -- inside ----------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        path = f"{self._folder}/{name}"
        self._paths.append(path)
        return path

    def _write_held(self, held: dict[str, torch.Tensor], shard_bytes: int, *, first_only: bool = False) -> None:
        plans = plan_shards((spec_of(name, tensor) for name, tensor in held.items()), max_bytes=shard_bytes)
        for plan in plans[:1] if first_only else plans:
            numbered = ShardPlan(f"model-{len(self._plans) + 1:05d}.safetensors", plan.tensors)
            self._write_shard(numbered, ((spec.name, held.pop(spec.name)) for spec in plan.tensors))

    def _write_shard(self, plan: ShardPlan, tensors: Iterator[Named]) -> None:
        self._plans.append(plan)
        writer = self._store.write(self._path(plan.file))
        try:
            shard = ShardWriter(writer, plan, algorithm=self._algorithm)
            for name, tensor in _in_plan_order(plan.tensors, tensors):
                with self._watch("write"):
                    shard.add(name, tensor_bytes(tensor))
                self._progress(tensor.nbytes)
                del tensor
            with self._watch("write"):
                file, entries = shard.finish()
        except BaseException:
            writer.abort()
            raise
        self.files.append(file)
        self.tensors.update((entry.name, entry) for entry in entries)


def _in_plan_order(specs: Iterable[TensorSpec], tensors: Iterator[Named]) -> Iterator[Named]:
    early: dict[str, torch.Tensor] = {}
    for spec in specs:
        while spec.name not in early:
            if (item := next(tensors, None)) is None:
                raise InvalidInput(f"the source ends before {spec.name!r}, which its metadata announces")
            early[item[0]] = item[1]
            del item
        yield spec.name, early.pop(spec.name)
