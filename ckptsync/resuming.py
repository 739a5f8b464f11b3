"""From a channel back into a model: after a disaster, at any world size, sharded in any way.

    point = ckptsync.resume("s3://bucket/run1", model)                       # on every rank
    publisher = ckptsync.Publisher("s3://bucket/run1", resumed_from=point.version)

Rank 0 looks for the version and decides; the others are told. Then, in this order:

1. names, shapes and dtypes are compared with the model's, before a byte of weights is read;
2. the files of the version are shared out over the ranks by size, and each is read whole and digested by one of
   them; a rank's part of a tensor cannot be checked against the digest of the whole, so this is what proves it;
3. once all ranks agree that every byte is right, each reads its own part of every tensor into the model.

So a version costs the store one reading of its bytes plus what the ranks hold, and a parameter changes only after
everything was found right. A version that is broken is passed over, with its name and the reason, for the next
older one.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import logs
from .channel import Channel
from .delta import whole as whole_version
from .digest import digest
from .errors import BadShard, ChannelEmpty, CkptSyncError, Corrupt, InvalidInput, NotFound
from .layout import TRAINER, trainer_files
from .manifest import MAIN_TRACK, FileEntry, Manifest, decode
from .ranks import Ranks
from .resume_match import Load, Resumable, match, targets_of
from .resume_read import check_inside, read_part, whole
from .resume_search import Offer, Refusal, offered
from .shards.read import Header, check_header, read_header
from .shards.tensors import TORCH_DTYPES, tensor_bytes
from .signing import Trust
from .store.base import Reader, Store
from .trainer_state import load_trainer_state
from .verify import verified_chunks
from .version import VersionId

log = logs.get(__name__)

PATIENCE = 60.0
"""Seconds that a file may take to appear to a rank after rank 0 has seen it: a file system is no barrier."""

READERS = 4
"""Tensors that a rank reads at a time; it holds so many of its parts in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a trainer goes on from; equal on every rank."""

    version: VersionId
    step: int | None
    metadata: dict[str, Any]
    passed_over: Mapping[VersionId, str] = field(default_factory=dict)
    """Newer versions that were not taken, and why."""

    has_trainer_state: bool = False
    """Whether `trainer_state` was restored, from this same version."""


def resume(
    root: str | PathLike[str] | Store,
    model: Resumable,
    version: str | int = "latest",
    *,
    trainer_state: MutableMapping[str, Any] | None = None,
    allow_cast: bool = False,
    allow_empty: bool = False,
    require_signature: str | Trust | None = None,
    timeout: float = 1800.0,
) -> ResumePoint | None:
    """Load a version into `model`, in place. Collective: call it on every rank.

    `model`: a module (dense, DDP, FSDP2, tensor-parallel) or a dict of its tensors; parameters and persistent
    buffers, under the names that a publish of it would use. `version`: `latest`, `42` or `e2-v42`. `allow_cast`:
    load although float dtypes differ, such as published BF16 into F32 master weights. `timeout`: seconds that a
    rank waits for the others. `require_signature`: trusted public keys, a PEM file or its text, on every rank; versions
    that none of them signed are passed over.

    `trainer_state`: a state dict as torch.distributed.checkpoint loads it, filled in place (a state dict that it
    returns for optimizers has to be set again afterwards). Weights and trainer state always come from one version:
    with `latest`, newer versions that were published without trainer state are passed over, unless no version has
    any; `ResumePoint.has_trainer_state` says whether it was restored.

    Raises on every rank, before a parameter changes: ChannelEmpty if nothing was ever published (None with
    `allow_empty`); BadManifest if versions are there and none is whole, which is never taken for a fresh start;
    VersionNotFound or BadShard for a version that was asked for by name; InvalidInput if the version does not fit
    the model, with counts and first names. A StoreError means the storage failed: nothing is known to be broken.
    A failure after parameters began to change says so; the model must then not be trained on.
    """
    ranks = Ranks(timeout=timeout)
    with closing(ranks):
        with ranks.together(), ExitStack() as views:
            channel = Channel.open(root, require_signature=require_signature)
            found = _Resume(channel, model, ranks, views, allow_cast, trainer_state).run(version)
        if not isinstance(found, Refusal):
            return found
    if found.kind == ChannelEmpty.__name__ and allow_empty:
        return None
    raise found.error()


class _Resume:
    """One call of `resume`, on one rank."""

    def __init__(
        self,
        channel: Channel,
        model: Resumable,
        ranks: Ranks,
        views: ExitStack,
        allow_cast: bool,
        trainer_state: MutableMapping[str, Any] | None,
    ) -> None:
        self._channel = channel
        self._store = self._channel.store
        self._views = views
        self._ranks, self._allow_cast, self._trainer_state = ranks, allow_cast, trainer_state
        self._targets = targets_of(model)
        ranks.same([f"{name} {list(t.shape)}" for name, t in self._targets.items()], "the tensors to resume into")

    def run(self, version: str | int) -> ResumePoint | Refusal:
        wants_state = self._trainer_state is not None
        if not self._ranks.is_writer:
            return self._first_whole(version, None)
        with closing(offered(self._channel, version, wants_state)) as offers:
            return self._first_whole(version, offers)

    def _first_whole(self, version: str | int, offers: Iterator[Offer | Refusal] | None) -> ResumePoint | Refusal:
        passed: dict[VersionId, str] = {}
        while True:
            offer = self._ranks.broadcast(next(offers) if offers is not None else None)
            if isinstance(offer, Refusal):
                return offer
            if offer is None:
                raise InvalidInput("rank 0 offers nothing")
            self._store = self._channel.store
            problem = offer.problem or self._problem(manifest := decode(offer.manifest, expect=offer.version))
            if not problem:
                return self._take(manifest, passed)
            if version != "latest":
                return Refusal(BadShard.__name__, f"{offer.version} cannot be resumed from: {problem}")
            passed[offer.version] = problem
            if self._ranks.is_writer:
                log.warning(
                    "%s is passed over: %s",
                    offer.version,
                    problem,
                    extra=logs.about(offer.version, event="passed-over"),
                )

    def _problem(self, manifest: Manifest) -> str:
        """Why the version's bytes are not those that its manifest lists; empty if they are."""
        self._loads = match(self._targets, manifest.tracks[MAIN_TRACK], manifest.id, self._allow_cast)
        if manifest.kind == "delta" and (problem := self._rebuild(manifest)):
            return problem
        share = shares(self._files(manifest), self._ranks.world_size)[self._ranks.rank]
        missing = absent(self._store, manifest, self._files(manifest)) if self._ranks.is_writer else ""
        if missing := self._ranks.broadcast(missing):
            return missing
        return next(filter(None, self._ranks.gather(self._verify(manifest, share))), "")

    def _rebuild(self, manifest: Manifest) -> str:
        """Look at a delta version as the full one that it stands for, from here on."""
        self._views.close()
        problem = ""
        try:
            self._store, _ = self._views.enter_context(whole_version(self._channel, manifest))
        except (Corrupt, NotFound) as error:
            problem = str(error)
        return next(filter(None, self._ranks.gather(problem)), "")

    def _files(self, manifest: Manifest) -> list[tuple[str, FileEntry]]:
        files = [(file.name, file) for file in manifest.tracks[MAIN_TRACK].files]
        if self._trainer_state is not None:
            files += trainer_files(manifest)
        return files

    def _verify(self, manifest: Manifest, share: Sequence[tuple[str, FileEntry]]) -> str:
        try:
            for path, file in share:
                with closing(self._open(f"{manifest.folder}/{path}")) as reader:
                    for _ in verified_chunks(reader, file, manifest.digest, path):
                        pass
        except (Corrupt, NotFound) as error:
            return str(error)
        return ""

    def _open(self, path: str) -> Reader:
        return open_patiently(self._store, path, 0.0 if self._ranks.is_writer else PATIENCE)

    def _take(self, manifest: Manifest, passed: Mapping[VersionId, str]) -> ResumePoint:
        try:
            fill(self._loads, manifest, self._open)
            has_state = self._trainer_state is not None and bool(manifest.trainer_state)
            if has_state and self._trainer_state is not None:
                folder = f"{manifest.folder}/{TRAINER}"
                load_trainer_state(self._trainer_state, lambda name: self._open(f"{folder}/{name}"), self._ranks)
        except CkptSyncError as error:
            # The kind stays, so that a caller can tell a failing store from wrong bytes.
            raise type(error)(f"{error}. Parameters may be partly overwritten: resume again before training") from error
        return ResumePoint(
            version=manifest.id,
            step=manifest.step,
            metadata=manifest.metadata,
            passed_over=dict(passed),
            has_trainer_state=has_state,
        )


# -- bytes ---------------------------------------------------------------------------------------------------


def shares(files: Sequence[tuple[str, FileEntry]], count: int) -> list[list[tuple[str, FileEntry]]]:
    """The files in `count` shares of about as many bytes each; the same on every rank."""
    split: list[list[tuple[str, FileEntry]]] = [[] for _ in range(count)]
    loads = [(0, rank) for rank in range(count)]
    for file in sorted(files, key=lambda item: (-item[1].size, item[0])):
        load, least = loads[0]
        split[least].append(file)
        heapq.heapreplace(loads, (load + file[1].size, least))
    return split


def absent(store: Store, manifest: Manifest, files: Sequence[tuple[str, FileEntry]]) -> str:
    """The first file that is listed and not there in its full size, as rank 0 sees it."""
    there = {entry.path: entry.size for entry in store.list(manifest.folder)}
    for path, file in files:
        size = there.get(f"{manifest.folder}/{path}")
        if size != file.size:
            return f"{path} has {size} of {file.size} bytes" if size is not None else f"{path} is not there"
    return ""


def open_patiently(store: Store, path: str, seconds: float) -> Reader:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return store.open(path)
        except NotFound:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.5)


def fill(loads: Sequence[Load], manifest: Manifest, open_file: Callable[[str], Reader]) -> None:
    """Read this rank's part of every tensor into the model, file by file, several tensors at a time."""
    by_file: OrderedDict[str, list[Load]] = OrderedDict()
    for load in loads:
        if all(load.part) or not load.part:  # of some tensors this rank holds nothing
            by_file.setdefault(load.entry.file, []).append(load)
    files = {file.name: file for file in manifest.tracks[MAIN_TRACK].files}
    for name, wanted in by_file.items():
        with closing(open_file(f"{manifest.folder}/{name}")) as reader:
            header = read_header(reader, name=name)
            check_header(header, files[name], manifest.tracks[MAIN_TRACK])
            _fill_from(reader, header, wanted, manifest.digest)


def _fill_from(reader: Reader, header: Header, loads: Sequence[Load], algorithm: str) -> None:
    with logs.Pool(READERS, thread_name_prefix="ckptsync-resume") as pool:
        pending: list[tuple[Load, Future[torch.Tensor]]] = []
        for load in loads:
            pending.append((load, pool.submit(_read, reader, header, load, algorithm)))
            if len(pending) == READERS:
                _copy(*pending.pop(0))
        for each in pending:
            _copy(*each)


def _read(reader: Reader, header: Header, load: Load, algorithm: str) -> torch.Tensor:
    stored, shape = header.tensors[load.entry.name], tuple(load.target.shape)
    check_inside(load.entry.name, load.part, shape)
    if stored.spec.dtype not in TORCH_DTYPES:
        raise InvalidInput(f"tensor {load.entry.name!r}: torch {torch.__version__} has no {stored.spec.dtype}")
    data = read_part(reader, stored.offset, shape, TORCH_DTYPES[stored.spec.dtype], load.part)
    if load.part == whole(shape) and (found := digest(tensor_bytes(data), algorithm)) != load.entry.digest:
        raise BadShard(f"{load.entry.name}: {algorithm} {found}, where the manifest says {load.entry.digest}")
    return data


@torch.no_grad()
def _copy(load: Load, data: Future[torch.Tensor]) -> None:
    target = load.target.detach()
    local = target.to_local() if isinstance(target, DTensor) else target
    local.copy_(data.result())


__all__ = ["ResumePoint", "resume"]
