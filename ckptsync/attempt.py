"""The data folder of one publish in the making: what was written so far, and how to take it away again."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from . import logs
from .digest import Bytes, digest
from .errors import CkptSyncError, InvalidInput
from .manifest import MAIN_TRACK, FileEntry, TensorEntry, TensorSpec, data_folder
from .shards.index import INDEX_NAME, index_bytes
from .shards.plan import ShardPlan, plan_shards
from .shards.tensors import spec_of, tensor_bytes
from .shards.write import ShardWriter
from .store.base import Store, Writer, put_bytes
from .version import VersionId

if TYPE_CHECKING:
    import torch

log = logs.get(__name__)

T = TypeVar("T")
Named = tuple[str, "torch.Tensor"]
Observe = Callable[[str, TensorSpec, memoryview], None]
"""Told of the track, the tensor and its bytes, which may be reused afterwards."""


class Nowhere:
    """A writer whose file never comes to be."""

    def write(self, data: Bytes) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...


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
    """Writes files into a data folder of its own. Only the manifest makes them a version.

    Every rank that writes has one, of the same version and nonce, and touches only its own files.
    """

    def __init__(
        self,
        store: Store,
        version: VersionId,
        *,
        algorithm: str,
        watch: Stopwatch,
        progress: Callable[[int], None],
        nonce: str = "",
    ) -> None:
        self.version = version
        self.nonce = nonce or uuid.uuid4().hex
        self.may_exist = False
        """Whether a manifest may name these files by now: then they must not be deleted."""

        self.paths: list[str] = []
        """Every file that was begun, relative to the root."""

        self.inherits: Callable[[str, FileEntry], bool] = lambda *_: False
        """Whether a small file (path and entry) need not be written, since a delta's bases all have it."""

        self.stored: list[str] = []
        """The small files that were written, relative to the data folder."""

        self.algorithm, self.watch, self.progress = algorithm, watch, progress
        self._store, self._folder = store, data_folder(version, self.nonce)

    def put(self, name: str, data: bytes) -> FileEntry:
        """One small file that the manifest lists, written unless it is inherited; `name` is as for `write`."""
        entry = FileEntry(name=name.rpartition("/")[2], size=len(data), digest=digest(data, self.algorithm))
        if not self.inherits(name, entry):
            self.put_unlisted(name, data)
            self.stored.append(name)
        return entry

    def put_unlisted(self, name: str, data: bytes) -> None:
        """A file that the manifest cannot list: its own copy."""
        with self.watch("write"):
            put_bytes(self._store, self.path(name), data)

    def write(self, name: str) -> Writer:
        """Start a file; `name` is relative to the data folder."""
        return self._store.write(self.path(name))

    def path(self, name: str) -> str:
        """The path of a file that is about to be written, remembered for `discard`."""
        path = f"{self._folder}/{name}"
        self.paths.append(path)
        return path

    def discard(self) -> None:
        """Delete this attempt's files, best effort; what stays is swept by a later epoch. Logs a failure.

        Stops at the first failure, since a store that is down costs its full timeout for each file.
        """
        try:
            for path in self.paths:
                self._store.delete(path)
        except CkptSyncError as error:
            log.warning(
                "%s was not cleaned up and is left to be swept: %s",
                self._folder,
                error,
                extra=logs.about(self.version, event="not-cleaned-up"),
            )


class TrackFiles:
    """What one rank writes of one track, and what the manifest will say of it.

    `observe` is shown every tensor's bytes. Without `keep` shards are planned and digested, and go nowhere.
    """

    def __init__(
        self, attempt: Attempt, track: str = MAIN_TRACK, *, observe: Observe | None = None, keep: bool = True
    ) -> None:
        self.files: list[FileEntry] = []
        self.tensors: dict[str, TensorEntry] = {}
        self.plans: list[ShardPlan] = []
        self._attempt = attempt
        self._track, self._observe, self._keep = track, observe, keep
        self._prefix = "" if track == MAIN_TRACK else f"{track}/"

    def put(self, name: str, data: bytes) -> None:
        """One small file beside the shards, listed in the manifest."""
        self.files.append(self._attempt.put(self._prefix + name, data))

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

    def write_index(self, plans: Iterable[ShardPlan]) -> None:
        """`model.safetensors.index.json` over every rank's shards, after them."""
        self.put(INDEX_NAME, index_bytes(plans))

    # -- inside ----------------------------------------------------------------------------------------------

    def _write_held(self, held: dict[str, torch.Tensor], shard_bytes: int, *, first_only: bool = False) -> None:
        plans = plan_shards((spec_of(name, tensor) for name, tensor in held.items()), max_bytes=shard_bytes)
        for plan in plans[:1] if first_only else plans:
            numbered = ShardPlan(f"model-{len(self.plans) + 1:05d}.safetensors", plan.tensors)
            self._write_shard(numbered, ((spec.name, held.pop(spec.name)) for spec in plan.tensors))

    def _write_shard(self, plan: ShardPlan, tensors: Iterator[Named]) -> None:
        self.plans.append(plan)
        writer = self._attempt.write(self._prefix + plan.file) if self._keep else Nowhere()
        watch, specs = self._attempt.watch, {spec.name: spec for spec in plan.tensors}
        try:
            shard = ShardWriter(writer, plan, algorithm=self._attempt.algorithm)
            for name, tensor in _in_plan_order(plan.tensors, tensors):
                with watch("write"):
                    data = tensor_bytes(tensor)
                    shard.add(name, data)
                if self._observe is not None:
                    with watch("encode"):
                        self._observe(self._track, specs[name], data)
                self._attempt.progress(tensor.nbytes)
                del tensor
            with watch("write"):
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
