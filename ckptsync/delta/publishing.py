"""One publish under a DeltaPolicy, on every rank: whole, or as changes, or both.

Rank 0 decides from what is committed; every rank that writes compares its own tensors with its own baseline. The
shards of a delta version are planned, ordered and digested exactly as a full publish would write them, and go
nowhere: so its manifest lists what a reader rebuilds, and the content digest is the same.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .. import logs
from ..attempt import Attempt
from ..channel import Channel
from ..errors import Corrupt, NotFound
from ..ledger import Ledger
from ..manifest import Base, FileEntry, Manifest, Parent, TensorSpec, decode, delta_path
from ..ranks import Ranks
from ..release import Parts, Release
from ..shards.plan import ShardPlan
from ..shards.write import ShardWriter
from ..store.base import Store
from .baseline import Baseline, Comparison, Key, Plans, identity, restore
from .layout import Bytes
from .messages import Messages
from .on_gpu import OnGpu
from .policy import DeltaPolicy

log = logs.get(__name__)

THREADS = min(8, os.cpu_count() or 1)
"""Blocks that a rank encodes at a time."""


LAID_OUT_BY = "changes need the same writers, shard_bytes and, but for writers='rank0', world size as before"


@dataclass(frozen=True, slots=True)
class _Decision:
    """Rank 0's, the same on every rank."""

    full: bool
    position: int
    """Versions since the last full one, this one included; 0 for a full one."""

    last: bytes | None
    """The manifest to compare with; None if there is none."""

    distances: tuple[int, ...] = ()
    """Of the bases besides: how many versions back."""

    restore: bool = False
    """Whether the baseline has to be read from the store: after a restart, or an answer that was lost."""


class DeltaWriter:
    """What a rank keeps between publishes. Every method is collective."""

    def __init__(self, policy: DeltaPolicy, writers: Sequence[int]) -> None:
        self._policy, self._writers = policy, writers
        self._baseline: Baseline | None = None
        self._skips: dict[int, Baseline] = {}
        self._position, self._chain = 0, 0
        self._pending: tuple[Comparison, int] | None = None
        self._messages: dict[str, Messages] = {}
        self._on_gpu = OnGpu(policy.effort) if policy.on_gpu else None

    def write(
        self, release: Release, attempt: Attempt | None, ranks: Ranks, ledger: Ledger | None, store: Callable[[], Store]
    ) -> tuple[Release, Parts]:
        """The release as it is to be recorded, and what every rank wrote. `commit` or `drop` has to follow."""
        self.drop()
        decision = ranks.broadcast(self._decide(release, attempt, ledger) if ledger and attempt else None)
        if decision is None:
            self._baseline, self._messages = None, {}
            return release, ranks.gather(release.write(attempt, ranks))
        decision = self._ready(decision, release, attempt, ranks, store)
        with logs.Pool(THREADS, thread_name_prefix="ckptsync-delta") as pool:
            comparison = self._comparison(decision, pool)
            if not decision.full and ledger and attempt:
                self._inherit(attempt, ledger, comparison)
            messages = self._begin_messages(release, ranks, comparison)
            near = self._begin_on_gpu(release, ranks, comparison)
            parts: Parts = ranks.gather(
                near.write(attempt, ranks, observe=comparison, keep=decision.full, messages=messages)
            )
        sizes = [sum(each) for each in zip(*ranks.gather(comparison.nbytes()), strict=True)]
        full = sum(assignment.nbytes or 0 for assignment in release.assignments)
        worth = [size <= self._policy.max_ratio * full for size in sizes]
        if not decision.full and not worth[0]:
            decision = dataclasses.replace(decision, full=True, position=0)
            parts = self._again(release, attempt, ranks)
        self._pending = comparison, decision.position
        parent = self._store_changes(comparison, worth, attempt, ranks)
        return dataclasses.replace(release, kind="full" if decision.full else "delta", parent=parent), parts

    def to_come(self, release: Release, rank: int) -> int:
        """Bytes of host memory that this rank will remember and has not taken yet."""
        plans = [plan for a in release.assignments for plan in (a.plans or {}).get(rank, ())]
        held = [each.nbytes for each in (self._baseline, *self._skips.values()) if each is not None]
        return max(0, (1 + len(self._policy.skip)) * sum(plan.nbytes for plan in plans) - sum(held))

    def commit(self, manifest: Manifest) -> None:
        """The version is committed: what comes next is compared with it."""
        if self._pending is None:
            return
        (comparison, self._position), self._pending = self._pending, None
        version = identity(manifest)
        self._chain = self._chain + manifest.deltas[0].nbytes if manifest.kind == "delta" else 0
        if self._on_gpu is not None:
            self._on_gpu.commit(version)
        for messages in self._messages.values():
            messages.commit()
        if comparison.fresh is not None:
            comparison.fresh.version = version
            # A retry of a version that is a delta already: how far its full one is away, the chain will tell.
            self._baseline, self._skips = comparison.fresh if manifest.kind == "full" else None, {}
        elif self._baseline is not None:
            self._baseline.follow(comparison.blobs[0], comparison.specs, version)
        if self._baseline is None:
            return
        for distance in self._policy.skip:
            if self._position % distance == 0 and self._position + distance <= self._policy.anchor_every:
                self._skips[distance] = self._baseline.copy_to(self._skips.get(distance))

    def drop(self) -> None:
        """The version was not committed: the baseline stays."""
        self._pending = None

    # -- what to do ------------------------------------------------------------------------------------------

    def _decide(self, release: Release, attempt: Attempt, ledger: Ledger) -> _Decision | None:
        if release.kind != "full" or any(assignment.plans is None for assignment in release.assignments):
            return None
        last = ledger.last
        if last is None or last.kind == "adapter" or attempt.version <= last.id:
            return _Decision(True, 0, None)
        layout, before = _layout(release), _layout_of(last)
        if layout != before:
            if _tensors(layout) == _tensors(before):  # of another model the ledger says that it is one
                _say_given_up(f"the shards of {last.id} are laid out otherwise: {LAID_OUT_BY}")
            return _Decision(True, 0, None)
        if ledger.channel.signer is not None and not last.signed:
            return _Decision(True, 0, None)  # who requires signatures cannot use it as a base
        lost = self._baseline is None or self._baseline.version != identity(last)
        if lost:
            self._position, self._chain = _since_full(ledger.channel, last)
        position = self._position + 1
        distances = tuple(each for each in self._policy.skip if position % each == 0)
        full = self._policy.is_due(position, self._chain / last.nbytes)
        return _Decision(full, 0 if full else position, last.encoded, distances, lost)

    def _ready(
        self, decision: _Decision, release: Release, attempt: Attempt | None, ranks: Ranks, store: Callable[[], Store]
    ) -> _Decision:
        """See that every rank has the baseline; where one cannot be read, all start anew with a full version."""
        if decision.last is None:
            return decision
        last, problem = decode(decision.last), ""
        if decision.restore:
            plans = {a.walk.track: (a.plans or {}).get(ranks.rank, ()) for a in release.assignments}
            problem = self._restore(last, plans if attempt is not None else {}, store)
        elif self._baseline is None or self._baseline.version != identity(last):
            problem = f"rank {ranks.rank} remembers another version than {last.id}"
        if found := next(filter(None, ranks.gather(problem)), ""):
            if ranks.is_writer:
                _say_given_up(found)
            return _Decision(True, 0, None)
        return decision

    def _restore(self, last: Manifest, plans: Plans, store: Callable[[], Store]) -> str:
        """Have the baseline of `last` from the store; says why that cannot be. A rank that writes nothing reads
        nothing."""
        try:
            restored = restore(Channel.open(store()), last, plans) if plans else Baseline(identity(last))
        except (Corrupt, NotFound) as error:
            return f"{last.id} cannot be compared with: {error}"
        self._baseline, self._skips, self._messages = restored, {}, {}
        return ""

    def _comparison(self, decision: _Decision, pool: logs.Pool) -> Comparison:
        if decision.last is None or self._baseline is None:
            fresh = Baseline(Parent(epoch=0, number=0, content_digest=""))
            return Comparison((), self._policy.effort, pool, fresh=fresh)
        skips = [self._skips[each] for each in decision.distances if each in self._skips]
        return Comparison([self._baseline, *skips], self._policy.effort, pool)

    def _begin_messages(self, release: Release, ranks: Ranks, comparison: Comparison) -> dict[str, Messages]:
        """How tensors travel between ranks: as changes, where the writer has the version that they are against."""
        if ranks.world_size == 1:
            return {}
        whole = self._baseline if comparison.fresh is None else None
        for assignment in release.assignments:
            track, items = assignment.walk.track, assignment.walk.items or ()
            keys = {item.name: (track, item.outputs[0][1].name) for item in items
                    if release.config.transform is None and item.outputs}  # fmt: skip
            messages = self._messages.setdefault(track, Messages(on_gpu=self._policy.on_gpu))
            messages.begin(whole, keys, comparison.pool)
        return self._messages

    def _begin_on_gpu(self, release: Release, ranks: Ranks, comparison: Comparison) -> Release:
        """Compare on the GPU what is there; the release with what the host makes of it."""
        if self._on_gpu is None or ranks.world_size > 1:
            return release
        with release.watch("encode"):
            base = self._baseline if comparison.fresh is None else None
            near, comparison.known = self._on_gpu.begin(release, base, comparison.pool)
        return near

    def _inherit(self, attempt: Attempt, ledger: Ledger, comparison: Comparison) -> None:
        """Files that are the same in every base are not written again."""
        bases = [dict(ledger.channel.manifest(base.version.id).files()) for base in comparison.bases]
        attempt.inherits = lambda path, file: all(files.get(path) == file for files in bases)

    def _again(self, release: Release, attempt: Attempt | None, ranks: Ranks) -> Parts:
        if attempt is not None:
            attempt.inherits = lambda *_: False
        return ranks.gather(release.write(attempt, ranks))

    # -- the changes -----------------------------------------------------------------------------------------

    def _store_changes(
        self, comparison: Comparison, worth: Sequence[bool], attempt: Attempt | None, ranks: Ranks
    ) -> Parent | None:
        """Write those that are worth it; the record of them, on rank 0."""
        files = [self._write_blobs(base.version, blobs, attempt, ranks.rank) if good else {}
                 for base, blobs, good in zip(comparison.bases, comparison.blobs, worth, strict=True)]  # fmt: skip
        each = ranks.gather(files)
        if not worth or not worth[0]:
            return None
        bases = []
        for index, base in enumerate(comparison.bases):
            by_track: dict[str, tuple[FileEntry, ...]] = {}
            for rank in each:
                for track, file in rank[index].items():
                    by_track[track] = (*by_track.get(track, ()), file)
            bases.append((base.version, by_track))
        skips = tuple(
            Base(epoch=base.epoch, number=base.number, content_digest=base.content_digest, files=files)
            for (base, files), good in zip(bases[1:], worth[1:], strict=True)
            if good
        )
        return msgspec.structs.replace(bases[0][0], files=bases[0][1], skips=skips)

    def _write_blobs(
        self, base: Parent, blobs: Mapping[Key, Bytes], attempt: Attempt | None, rank: int
    ) -> dict[str, FileEntry]:
        """One file for each track that changed in what this rank writes."""
        if attempt is None:
            return {}
        number = self._writers.index(rank) + 1
        name = f"delta-{number:05d}-of-{len(self._writers):05d}.safetensors"
        files = {}
        for track in dict.fromkeys(track for track, _ in blobs):
            own = {tensor: blob for (each, tensor), blob in blobs.items() if each == track}
            plan = ShardPlan(name, tuple(TensorSpec(tensor, "U8", (len(blob),)) for tensor, blob in own.items()))
            with attempt.watch("write"):
                files[track] = _write_file(attempt, delta_path(base.id, track, name), plan, own)
        return files


def _write_file(attempt: Attempt, path: str, plan: ShardPlan, blobs: Mapping[str, Bytes]) -> FileEntry:
    writer = attempt.write(path)
    try:
        shard = ShardWriter(writer, plan, algorithm=attempt.algorithm, align=8)
        for name, blob in blobs.items():
            shard.add(name, blob)
        return shard.finish()[0]
    except BaseException:
        writer.abort()
        raise


def _say_given_up(why: str) -> None:
    log.warning("a full version is published: %s", why, extra={"event": "delta-given-up"})


_Layout = dict[tuple[str, str], list[TensorSpec]]


def _layout(release: Release) -> _Layout:
    """(track, file) -> its tensors in order."""
    return {(a.walk.track, plan.file): list(plan.tensors)
            for a in release.assignments for plans in (a.plans or {}).values() for plan in plans}  # fmt: skip


def _layout_of(manifest: Manifest) -> _Layout:
    layout: _Layout = {}
    for name, track in manifest.tracks.items():
        for tensor in track.tensors:
            if tensor.file:
                layout.setdefault((name, tensor.file), []).append(tensor.spec)
    return layout


def _tensors(layout: _Layout) -> set[tuple[str, TensorSpec]]:
    return {(track, spec) for (track, _), specs in layout.items() for spec in specs}


def _since_full(channel: Channel, manifest: Manifest) -> tuple[int, int]:
    """The deltas between this version and the full one that it comes from: how many, and their bytes without skips."""
    count = nbytes = 0
    while manifest.kind == "delta" and manifest.parent is not None:
        count, nbytes = count + 1, nbytes + manifest.parent.nbytes
        try:
            manifest = channel.manifest(manifest.parent.id)
        except (Corrupt, NotFound):
            break
    return count, nbytes
