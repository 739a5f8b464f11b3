"""Publish weights from the ranks of a trainer: collective, streaming, whole or not at all.

    publisher = Publisher("s3://bucket/run1", dtype=torch.bfloat16)      # on every rank
    for step in ...:
        train(model)
        publisher.publish(model, step=step, assets="path/of/base/model")  # on every rank

Rank 0 decides and commits; who writes is `writers`. The others gather with the writers and keep nothing. A
failure on one rank raises on all, and then there is no manifest, so no version: readers see the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, overload

import msgspec

from .assets import assets_of
from .attempt import Attempt, Stopwatch
from .background import Background, BackgroundPublish
from .config import PublisherConfig, with_overrides
from .errors import Busy, InvalidInput, RankFailed
from .export.coverage import expected_names
from .export.lora import Prepared, prepare
from .export.snapshot import Arena, Held, hold_pulled, synchronize
from .export.source import Export, Publishable, Walk, open_tracks
from .layout import ADAPTER_CONFIG, ADAPTER_FILE
from .ledger import Ledger
from .manifest import MAIN_TRACK, FileEntry, Kind, Manifest, canonical, data_folder, decode
from .preflight import MARGIN, check_memory, check_space
from .ranks import Ranks
from .release import Assets, Facts, Release, refuse_nothing
from .remap import Naming, rules_of
from .shards.plan import check_specs
from .shares import Assignment, assign, assign_file, writing_ranks
from .store import open_store
from .store.base import Store
from .trainer_state import Saving
from .version import VersionId

Progress = Callable[[int], None]
Folders = str | Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one publish did; equal on every rank."""

    version: VersionId
    nbytes: int
    """Bytes of all files of the version."""

    seconds: dict[str, float]
    """Rank 0's time by phase: `gather` (waiting for tensors), `write` (digest and storage), `commit`; in the
    background also `snapshot`, which is what the training waited for."""

    changed: bool
    """False if the content equals the version's before: weights that were meant to change have not."""

    content_digest: str
    manifest: Manifest


class Publisher:
    """Publishes versions to the channel at `root`. Every method is collective: call it on every rank.

    Constructing it claims the next epoch, which fences every older publisher of the channel (they raise
    Fenced at their next publish). `overrides` are fields of PublisherConfig. Only rank 0, and the ranks that
    `writers` names, ever look at `root`.
    """

    def __init__(self, root: str | Store, *, config: PublisherConfig | None = None, **overrides: Any) -> None:
        self.config = with_overrides(config or PublisherConfig(), overrides)
        self._root = root
        self._ranks = Ranks(timeout=self.config.timeout)
        self._side: Ranks | None = None
        self._ledger: Ledger | None = None
        self._expected: frozenset[str] | None = None
        with self._ranks.together():
            self._writers = writing_ranks(self.config.writers, self._ranks)
            if self._ranks.is_writer:
                if self.config.expect is not None:
                    self._expected = expected_names(self.config.expect)
                self._ledger = Ledger(root, self.config)
            self.epoch = self._ranks.broadcast(self._ledger.epoch.number if self._ledger else 0)
            """The epoch that this publisher claimed."""
        self._store: Store | None = self._ledger.channel.store if self._ledger else None
        self._arena = Arena()
        self._background = Background(self.config.exit_seconds)

    @overload
    def publish(
        self,
        model: Publishable | None = None,
        *,
        tracks: Mapping[str, Publishable] | None = None,
        number: int | None = None,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        assets: Folders | None = None,
        kind: Kind = "full",
        adapter: str = "default",
        merge_lora: bool = False,
        trainer_state: Mapping[str, Any] | None = None,
        progress: Progress = ...,
        background: Literal[False] = False,
    ) -> Published: ...

    @overload
    def publish(
        self,
        model: Publishable | None = None,
        *,
        tracks: Mapping[str, Publishable] | None = None,
        number: int | None = None,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        assets: Folders | None = None,
        kind: Kind = "full",
        adapter: str = "default",
        merge_lora: bool = False,
        trainer_state: Mapping[str, Any] | None = None,
        progress: Progress = ...,
        background: Literal[True],
    ) -> BackgroundPublish: ...

    def publish(
        self,
        model: Publishable | None = None,
        *,
        tracks: Mapping[str, Publishable] | None = None,
        number: int | None = None,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        assets: Folders | None = None,
        kind: Kind = "full",
        adapter: str = "default",
        merge_lora: bool = False,
        trainer_state: Mapping[str, Any] | None = None,
        progress: Progress = lambda _: None,
        background: bool = False,
    ) -> Published | BackgroundPublish:
        """Publish a module, a state dict, a WeightSource or an iterator of (name, tensor) as a full version.

        All ranks pass the same model in the same order. Returns on every rank once the version is complete
        and durable; readers may see it a moment earlier, and never a part of it.

        `tracks`: several models by name that make one version, instead of `model`. `number`: the version's
        number, by default the last one plus 1. A number of this epoch that is taken already is a retry: a
        no-op for the same content, else VersionExists. `metadata`: anything that is JSON. `assets`: a local
        Hugging Face folder on rank 0 whose config, tokenizer and generation files are copied beside the
        weights, or one for each track; a transformers module brings its config by itself. `progress`: called
        with bytes that this rank has just written.

        `kind="adapter"`: the LoRA adapter `adapter` of a PEFT model, as a PEFT directory. `merge_lora`: a full
        version with that adapter folded in, in float32 and rounded once. `trainer_state`: what a trainer needs
        besides, as torch.distributed.checkpoint saves it; every rank writes its part, and `resume` restores it.

        `background`: return as soon as host memory holds what each rank will write or send, so that the next
        optimizer step may begin; the rest goes on over a group of its own. A failure comes out of `result()`
        and, unless that has raised it on every rank, of the next publish. One at a time: see `pending`. Call
        `close` before the process group is taken down; exit and SIGTERM are described in `background.py`.

        Raises on every rank: InvalidInput and its kinds before anything is written, RanksDisagree, Fenced,
        VersionExists, RankFailed (the failing rank's words; its own error is the cause there), RankTimeout.
        In a single process the store's own errors are raised as such.
        """
        if self._settle(background):
            return BackgroundPublish(skipped=True)
        watch = Stopwatch(*(["snapshot"] if background else []), "gather", "write", "commit")
        handle = BackgroundPublish()
        moved = _checking(handle, progress) if background else progress
        with self._ranks.together():
            models = _models(model, tracks)
            lora = prepare(models, kind=kind, adapter=adapter, merge_lora=merge_lora, dtype=self.config.dtype)
            release = self._prepare(lora, (number, step, metadata, assets), watch, moved)
            if trainer_state is not None:
                saving = Saving(trainer_state, self._ranks, copy=background)
                release = dataclasses.replace(release, saving=saving)
            if background:
                with watch("snapshot"):
                    release = self._hold(release)
            else:
                check_memory(self._ranks, self._peak(release))
        if not background:
            return self._out(release, self._ranks)
        side = self._side_ranks()
        self._background.start(handle, lambda: self._out(release, side))
        return handle

    def close(self) -> None:
        """Wait for a pending background version, then give the process groups back.

        The epoch stays claimed: a later publisher takes the next one. A failure that nobody has asked for is
        in the log.
        """
        if self._background.current is not None:
            self._background.current.wait()
        for ranks in (self._side, self._ranks):
            if ranks is not None:
                ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- in the foreground -----------------------------------------------------------------------------------

    def _settle(self, background: bool) -> bool:
        """Wait for the version before, and raise its error; whether this one is to be skipped instead."""
        last = self._background.current
        if last is None:
            return False
        if background and self.config.pending != "wait" and self._ranks.broadcast(not last.done()):
            if self.config.pending == "skip":
                return True
            raise Busy("the background publish before is not complete: wait for its result(), or use pending='wait'")
        last.wait()
        self._background.current = None
        if any(self._ranks.gather(last.error is not None and not last.seen)):
            raise last.error or RankFailed("the background publish before failed on another rank")
        return False

    def _prepare(self, lora: Prepared, given: tuple[Any, ...], watch: Stopwatch, progress: Progress) -> Release:
        """Everything that can be refused is, before the first byte."""
        config = self.config
        naming = Naming(rules_of(config.remove, config.remap), config.param_prefix, config.track_prefix)
        how = Export(
            dtype=config.dtype, ties=config.ties, bucket_bytes=config.bucket_bytes, transform=config.transform,
            naming=naming,
        )  # fmt: skip
        if lora.adapter is not None:  # its names are PEFT's, not those that the rules are for
            how = Export(dtype=config.dtype, ties="duplicate", bucket_bytes=config.bucket_bytes)
            naming = how.naming
        walks = open_tracks(lora.models, self._ranks, how)
        facts = None
        if self._ranks.is_writer:
            number, step, metadata, assets = given
            facts = Facts.check(number, step, metadata, self._assets(lora, walks, assets))
        whole = lora.adapter is None
        release = Release(
            assignments=[assign(walk, self._writers, config.shard_bytes) if whole else assign_file(walk, ADAPTER_FILE)
                         for walk in walks],
            kind="full" if whole else "adapter", expected=self._expected if whole else None,
            naming=naming, config=config, facts=facts, watch=watch, progress=progress,
        )  # fmt: skip
        self._check(release)
        return release

    def _check(self, release: Release) -> None:
        for assignment in release.assignments:
            if (specs := assignment.walk.specs) is not None:
                check_specs(specs)
                refuse_nothing(specs)
                release.check_names(assignment, [spec.name for spec in specs])
        sizes = [assignment.nbytes for assignment in release.assignments]
        if self._store is not None and self._ranks.is_writer:
            check_space(self._store, sum(size or 0 for size in sizes) + MARGIN)

    def _peak(self, release: Release) -> int:
        """Host memory of this rank while the version is written, beyond a snapshot, where that is known.

        A bucket and a tensor, and as much again that the allocator has not given back yet: measured, not reckoned.
        """
        sizes = [item.nbytes for a in release.assignments for item in a.shares.get(self._ranks.rank, ())]
        return MARGIN + 2 * min(self.config.bucket_bytes, sum(sizes)) + 2 * max(sizes, default=0)

    def _assets(self, lora: Prepared, walks: list[Walk], folders: Folders | None) -> Assets:
        if lora.adapter is not None:
            return {MAIN_TRACK: {ADAPTER_CONFIG: lora.adapter.config}}
        by_track = {MAIN_TRACK: folders} if isinstance(folders, str) else dict(folders or {})
        tracks = {walk.track for walk in walks}
        if unknown := by_track.keys() - tracks:
            raise InvalidInput(f"assets: there is no track {min(unknown)!r}, only {', '.join(sorted(tracks))}")
        return {track: assets_of(lora.owners.get(track), by_track.get(track), self.config.dtype) for track in tracks}

    # -- for the background ----------------------------------------------------------------------------------

    def _hold(self, release: Release) -> Release:
        """The same release from host memory: nothing of the model or of the caller is looked at again."""
        ranks, dtype = self._ranks, self.config.dtype
        held: list[Assignment] = []
        copies: list[tuple[Assignment, Held]] = []
        for assignment in release.assignments:
            if assignment.walk.items is None:
                walk = hold_pulled(assignment.walk, ranks)
                held.append(assign(walk, (0,), self.config.shard_bytes))
            else:
                copies.append((assignment, Held(assignment.walk.items, assignment.shares, ranks, dtype)))
        size = sum(each.nbytes for _, each in copies)
        check_memory(ranks, max(0, size - self._arena.nbytes) + self._peak(release))
        self._arena.begin(size)
        for assignment, each in copies:
            shares = each.copy(self._arena)
            held.append(dataclasses.replace(assignment, shares=shares, layouts=each.layouts))
        synchronize(item for assignment, _ in copies for item in assignment.walk.items or ())
        return dataclasses.replace(release, assignments=held)

    def _side_ranks(self) -> Ranks:
        """The ranks again, over a group that only the background uses."""
        if self._side is None:
            self._side = Ranks(timeout=self.config.timeout)
        return self._side

    # -- out to storage --------------------------------------------------------------------------------------

    def _out(self, release: Release, ranks: Ranks) -> Published:
        attempt: Attempt | None = None
        try:
            with ranks.together():
                attempt = self._begin(release, ranks)
                parts = ranks.gather(release.write(attempt, ranks))
                saved = self._save(release, attempt, ranks)
                # From here rank 0 alone may delete: it knows whether the manifest may exist.
                paths = ranks.gather(attempt.paths if attempt else [])
                outcome = None
                if attempt is not None and self._ledger is not None:
                    attempt.paths[:] = [path for each in paths for path in each]
                    with release.watch("commit"):
                        tracks = release.tracks(attempt, parts)
                        manifest = release.manifest(self._ledger, attempt, tracks, ranks, saved)
                        outcome = self._ledger.commit(attempt, manifest, require_change=self.config.require_change)
                elif attempt is not None:
                    attempt.may_exist = True
                return self._report(outcome, release.watch, ranks)
        except BaseException:
            if attempt is not None and not attempt.may_exist:
                attempt.discard()
            raise

    def _begin(self, release: Release, ranks: Ranks) -> Attempt | None:
        """Fenced before anything is written. The version and the nonce are rank 0's."""
        watch, progress, algorithm = release.watch, release.progress, self.config.digest
        attempt = None
        if self._ledger is not None and release.facts is not None:
            attempt = self._ledger.attempt(release.facts.number, algorithm, watch, progress)
        identity = ranks.broadcast((attempt.version, attempt.nonce) if attempt else None)
        if attempt is not None or identity is None or ranks.rank not in self._writers:
            return attempt
        version, nonce = identity
        return Attempt(self._opened(), version, algorithm=algorithm, watch=watch, progress=progress, nonce=nonce)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = open_store(self._root) if isinstance(self._root, str) else self._root
        return self._store

    def _save(self, release: Release, attempt: Attempt | None, ranks: Ranks) -> tuple[FileEntry, ...]:
        """The trainer state, written by all ranks."""
        if release.saving is None:
            return ()
        folder = ranks.broadcast(data_folder(attempt.version, attempt.nonce) if attempt else "")
        if attempt is not None and self._ledger is not None:
            attempt.paths += release.saving.paths(folder, ranks.world_size)
        return release.saving.save(self._opened(), folder, ranks, self.config.digest)

    def _report(self, outcome: tuple[Manifest, bool] | None, watch: Stopwatch, ranks: Ranks) -> Published:
        sent = None
        if outcome is not None:
            sent = (canonical(msgspec.to_builtins(outcome[0])), outcome[1], watch.seconds)
        received = ranks.broadcast(sent)
        if received is None:
            raise InvalidInput("rank 0 has nothing to report")
        data, changed, seconds = received
        manifest = decode(data)
        return Published(
            version=manifest.id,
            nbytes=manifest.nbytes,
            seconds=seconds,
            changed=changed,
            content_digest=manifest.content_digest,
            manifest=manifest,
        )


def _models(model: Publishable | None, tracks: Mapping[str, Publishable] | None) -> Mapping[str, Publishable]:
    if (model is None) == (tracks is None):
        raise InvalidInput("publish either a model or tracks")
    return {MAIN_TRACK: model} if model is not None else dict(tracks or {})


def _checking(handle: BackgroundPublish, progress: Progress) -> Progress:
    def moved(nbytes: int) -> None:
        handle.check()
        progress(nbytes)

    return moved
