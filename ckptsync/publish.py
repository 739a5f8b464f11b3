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
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, overload

from . import logs
from .account import Account
from .arguments import check
from .assets import Folders, assets_of, folders_of
from .attempt import Attempt, Stopwatch
from .background import Background, BackgroundPublish
from .canary import Canary
from .config import PublisherConfig, with_overrides
from .delta import delta_writer
from .errors import Busy, InvalidInput, RankFailed
from .export.ahead import Ahead
from .export.coverage import expected_names
from .export.lora import Prepared
from .export.snapshot import Arena, Held, hold_pulled, synchronize
from .export.source import Publishable, Walk, models_of
from .layout import ADAPTER_CONFIG, ADAPTER_FILE
from .ledger import Ledger
from .manifest import MAIN_TRACK, FileEntry, Kind, Manifest, data_folder, decode
from .metrics import Metrics
from .opening import Content, open_walks
from .preflight import MARGIN, check_memory, check_space
from .published import Published
from .ranks import Ranks
from .release import Assets, Facts, Parts, Release, refuse_nothing
from .shards.plan import check_specs
from .shares import Assignment, assign, assign_file, writing_ranks
from .store import store_at
from .store.base import Store
from .trainer_state import Saving
from .version import VersionId

Progress = Callable[[int], None]


class Publisher:
    """Publishes versions to the channel at `root`. Every method is collective: call it on every rank.

    Constructing it claims the next epoch, which fences every older publisher of the channel (they raise
    Fenced at their next publish). `overrides` are fields of PublisherConfig. Only rank 0, and the ranks that
    `writers` names, ever look at `root`. `metrics` counts what rank 0 does, for Prometheus.
    """

    def __init__(
        self,
        root: str | PathLike[str] | Store,
        *,
        config: PublisherConfig | None = None,
        metrics: Metrics | None = None,
        **overrides: Any,
    ) -> None:
        self.config = with_overrides(config or PublisherConfig(), overrides)
        self._root = root
        self._ranks = Ranks(timeout=self.config.timeout)
        self._side: Ranks | None = None
        self._calling = threading.RLock()  # what an interrupt leaves locked does not lock its own thread out
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
        self.channel = self._ledger.channel if self._ledger else None
        """On rank 0."""
        if not isinstance(metrics, Metrics | None):
            raise InvalidInput(f"metrics is a ckptsync.metrics.Metrics, not {type(metrics).__name__}")
        self.metrics = metrics or Metrics()
        url = self._store.url if self._store else str(getattr(root, "url", root))
        self._account = Account(self.metrics, url, self.epoch, first=self._ledger is not None)
        self._deltas = delta_writer(self.config.delta, self._writers)
        self._arena, self._ahead = Arena(), Ahead()
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
        canary: Canary | None = None,
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
        canary: Canary | None = None,
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
        canary: Canary | None = None,
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
        no-op for the same content, else VersionExists. `metadata`: anything that is JSON. `canary`: what the model
        says to a probe prompt, for watchers that replay it (`ckptsync.canary.record`). `assets`: a local
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
        In a single process the store's own errors are raised as such."""
        with self._alone():
            if not isinstance(background, bool):
                raise InvalidInput(f"background={background!r}: must be True or False")
            if self._settle(background):
                self._account.skipped()
                return BackgroundPublish(skipped=True)
            handle = BackgroundPublish() if background else None
            with self._account.publishing(), self._ranks.together():
                check("progress", progress, callable(progress), "must be a function of a number of bytes")
                content = Content(models=models_of(model, tracks), kind=kind, adapter=adapter, merge_lora=merge_lora)
                lora = content.prepare(self.config)
                if handle is not None:
                    self._ahead.begin(lora.models.values(), self._ranks.rank)
                watch = Stopwatch(
                    *["snapshot"] * background, "gather", *["encode"] * bool(self._deltas), "write", "commit"
                )
                moved = handle.checking(progress) if handle else progress
                release = self._prepare(lora, (number, step, metadata, canary, assets), watch, moved)
                if trainer_state is not None:
                    release = dataclasses.replace(release, saving=Saving(trainer_state, self._ranks, copy=background))
                if handle is None:
                    check_memory(self._ranks, self._peak(release))
                else:
                    release = self._hold(release)
            with self._account.publishing():
                if handle is None:
                    return self._out(release, self._ranks)
                self._background.start(handle, partial(self._behind, release, self._side_ranks()))
            return handle

    def reserve(self) -> VersionId:
        """Collective. The identity of the next version, for weights that reach engines without files; it may be
        published later, by its number, or never. Fenced if a newer epoch exists."""
        with self._ranks.together():
            return self._ranks.broadcast(self._ledger.reserve() if self._ledger else VersionId(0, 0))

    def announce(self, version: VersionId) -> None:
        """Collective. To be called before an engine may hold what was reserved: its watcher then knows the label."""
        with self._ranks.together():
            if self._ledger is not None:
                self._ledger.announce(version)

    def give_back(self, version: VersionId) -> None:
        """Of `reserve`'s last answer, once it is certain that none of it is anywhere: the next one may be equal."""
        if self._ledger is not None:
            self._ledger.give_back(version)

    def close(self) -> None:
        """Wait for a pending background version, then give the process groups back.

        The epoch stays claimed: a later publisher takes the next one. A failure that nobody has asked for is
        in the log.
        """
        if self._background.current is not None:
            self._background.current.wait()
        if self._ledger is not None:
            self._ledger.close()
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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Busy for a second thread: what a delta is taken against is that of one version at a time, and a version
        made of two is complete and cannot be read."""
        if not self._calling.acquire(blocking=False):
            raise Busy("another thread is in publish() of this publisher: one call at a time")
        try:
            yield
        finally:
            self._calling.release()

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
        walks, naming = open_walks(lora, config, self._ranks)
        facts = None
        if self._ranks.is_writer:
            number, step, metadata, canary, assets = given
            facts = Facts.check(number, step, metadata, canary, self._assets(lora, walks, assets))
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
            check_space(self._store, sum(size or 0 for size in sizes))

    def _peak(self, release: Release) -> int:
        """Host memory of this rank while the version is written, beyond a snapshot, where that is known.

        A bucket and a tensor, and as much again that the allocator has not given back yet: measured, not reckoned.
        """
        sizes = [item.nbytes for a in release.assignments for item in a.shares.get(self._ranks.rank, ())]
        remembered = self._deltas.to_come(release, self._ranks.rank) if self._deltas else 0
        return MARGIN + 2 * min(self.config.bucket_bytes, sum(sizes)) + 2 * max(sizes, default=0) + remembered

    def _assets(self, lora: Prepared, walks: list[Walk], folders: Folders | None) -> Assets:
        if lora.adapter is not None:
            return {MAIN_TRACK: {ADAPTER_CONFIG: lora.adapter.config}}
        tracks = {walk.track for walk in walks}
        by_track = folders_of(folders, tracks)
        return {track: assets_of(lora.owners.get(track), by_track.get(track), self.config.dtype) for track in tracks}

    # -- for the background ----------------------------------------------------------------------------------

    def _hold(self, release: Release) -> Release:
        """The same release from host memory: nothing of the model or of the caller is looked at again."""
        with release.watch("snapshot"):
            return dataclasses.replace(release, assignments=self._copies(release))

    def _copies(self, release: Release) -> list[Assignment]:
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
        if not self._arena.begin(size):
            self._ahead.forget()
        for assignment, each in copies:
            shares = each.copy(self._arena, self._ahead)
            held.append(dataclasses.replace(assignment, shares=shares, layouts=each.layouts))
        synchronize(item for assignment, _ in copies for item in assignment.walk.items or ())
        return held

    def _side_ranks(self) -> Ranks:
        """The ranks again, over a group that only the background uses."""
        if self._side is None:
            self._side = Ranks(timeout=self.config.timeout)
        return self._side

    def _behind(self, release: Release, ranks: Ranks) -> Published:
        with self._account.behind():
            return self._out(release, ranks)

    # -- out to storage --------------------------------------------------------------------------------------

    def _out(self, release: Release, ranks: Ranks) -> Published:
        attempt: Attempt | None = None
        try:
            with ranks.together():
                attempt = self._begin(release, ranks)
                if self._deltas is None:
                    parts: Parts = ranks.gather(release.write(attempt, ranks))
                else:
                    release, parts = self._deltas.write(release, attempt, ranks, self._ledger, self._opened)
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
                done = self._report(outcome, release.watch, ranks)
                if self._deltas is not None:
                    self._deltas.commit(done.manifest)
                self._account.published(done)
                return done
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
        if identity is not None:
            logs.note(identity[0])
        if attempt is not None or identity is None or ranks.rank not in self._writers:
            return attempt
        version, nonce = identity
        return Attempt(self._opened(), version, algorithm=algorithm, watch=watch, progress=progress, nonce=nonce)

    def _opened(self) -> Store:
        if self._store is None:
            self._store = store_at(self._root)
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
            sent = (outcome[0].encoded, outcome[1], watch.seconds)
        received = ranks.broadcast(sent)
        if received is None:
            raise InvalidInput("rank 0 has nothing to report")
        data, changed, seconds = received
        return Published.of(outcome[0] if outcome is not None else decode(data), seconds, changed=changed)
