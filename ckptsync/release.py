"""One version on its way out: what it consists of, fixed at the call, and how its files and its record are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from . import __version__
from .arguments import check_whole
from .assets import model_facts
from .attempt import Attempt, Observe, Stopwatch, TrackFiles
from .canary import Canary
from .canonical import canonical
from .config import PublisherConfig
from .errors import InvalidInput
from .export.collect import Messages
from .export.coverage import check_coverage
from .ledger import Ledger
from .manifest import MAIN_TRACK, FileEntry, Kind, Manifest, Parent, TensorEntry, Track, combined_content
from .ranks import Ranks
from .remap import Naming
from .shards.plan import ShardPlan
from .shares import Assignment
from .trainer_state import Saving

Assets = Mapping[str, Mapping[str, bytes]]
"""Track -> file name -> content."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a version carries beside its weights, checked before the first byte is written. Nothing in it is shared
    with the caller, who may change its dicts while the version is on its way."""

    number: int | None
    step: int | None
    metadata: dict[str, Any]
    canary: Canary | None
    assets: Assets

    @classmethod
    def check(
        cls,
        number: int | None,
        step: int | None,
        metadata: Mapping[str, Any] | None,
        canary: Canary | None,
        assets: Assets,
    ) -> Facts:
        if number is not None:
            check_whole("number", number, 0)
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise InvalidInput(f"step={step!r}: must be an int or None")
        if step is not None and not 0 <= step < 1 << 63:
            raise InvalidInput(f"step={step}: must be 0 or more, and less than 2**63")
        try:
            plain = msgspec.json.decode(canonical(dict(metadata or {})))
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidInput(f"metadata must be JSON: {error}") from error
        except RecursionError:
            raise InvalidInput("metadata must be JSON: it contains itself, or is nested too deeply") from None
        return cls(number, step, plain, canary, assets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one rank wrote of one track."""

    files: tuple[FileEntry, ...]
    tensors: Mapping[str, TensorEntry]
    plans: tuple[ShardPlan, ...]


Parts = Sequence[Mapping[str, Written]]
"""What every rank wrote, by track."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A version in the making, the same on every rank; `facts` on rank 0 only."""

    assignments: Sequence[Assignment]
    naming: Naming
    expected: frozenset[str] | None
    config: PublisherConfig
    facts: Facts | None
    watch: Stopwatch
    progress: Callable[[int], None]
    kind: Kind = "full"
    saving: Saving | None = None
    """The trainer state that goes with it."""

    parent: Parent | None = None
    """What it has of deltas, on rank 0."""

    def write(
        self,
        attempt: Attempt | None,
        ranks: Ranks,
        *,
        observe: Observe | None = None,
        keep: bool = True,
        messages: Mapping[str, Messages] = {},
    ) -> dict[str, Written]:
        """Collective. This rank's part of every track, on storage when it returns; no `attempt`: it writes nothing."""
        written = {}
        for assignment in self.assignments:
            walk = assignment.walk
            items = walk.open(assignment.shares, assignment.layouts, ranks, messages.get(walk.track))
            tensors = self.watch.over("gather", items)
            files = TrackFiles(attempt, walk.track, observe=observe, keep=keep) if attempt else None
            if files is not None and self.facts is not None:
                for name, data in self.facts.assets.get(walk.track, {}).items():
                    files.put(name, data)
            if files is None:
                for _ in tensors:
                    raise InvalidInput("a rank that does not write was given a tensor to write")
                continue
            if assignment.plans is not None:
                files.write_planned(tensors, assignment.plans.get(ranks.rank, ()))
            else:
                files.write_unplanned(tensors, self.config.shard_bytes)
            written[walk.track] = Written(files=tuple(files.files), tensors=files.tensors, plans=tuple(files.plans))
        return written

    def tracks(self, attempt: Attempt, parts: Parts) -> dict[str, Track]:
        """On rank 0, from what every rank wrote: the tracks, with their index files written."""
        return {a.walk.track: self._track(attempt, a, [p[a.walk.track] for p in parts if a.walk.track in p])
                for a in self.assignments}  # fmt: skip

    def manifest(
        self,
        ledger: Ledger,
        attempt: Attempt,
        tracks: Mapping[str, Track],
        ranks: Ranks,
        trainer_state: tuple[FileEntry, ...] = (),
    ) -> Manifest:
        """The commit record, on rank 0."""
        facts = self.facts
        if facts is None:
            raise InvalidInput("only rank 0 makes the manifest")
        return Manifest(
            channel_id=ledger.channel.channel_id,
            epoch=attempt.version.epoch,
            number=attempt.version.number,
            nonce=attempt.nonce,
            run_id=ledger.epoch.run_id,
            kind=self.kind,
            parent=self.parent and msgspec.structs.replace(self.parent, stored=tuple(attempt.stored)),
            created=time.time(),
            producer=self._producer(ranks),
            step=facts.step,
            metadata=facts.metadata,
            digest=self.config.digest,
            content_digest=combined_content(tracks),
            tracks=dict(tracks),
            trainer_state=trainer_state,
            canary=facts.canary or msgspec.UNSET,
        )

    # -- inside ----------------------------------------------------------------------------------------------

    def _track(self, attempt: Attempt, assignment: Assignment, parts: Sequence[Written]) -> Track:
        own = TrackFiles(attempt, assignment.walk.track)
        stored = {name: entry for part in parts for name, entry in part.tensors.items()}
        refuse_nothing(stored)
        if assignment.walk.specs is None:
            self.naming.check_used()
            self.check_names(assignment, stored)
        if self.kind != "adapter":
            own.write_index([plan for part in parts for plan in part.plans])
        tensors = _with_ties(stored, assignment.walk.ties)
        files = tuple(file for part in parts for file in part.files) + tuple(own.files)
        assets = self.facts.assets.get(assignment.walk.track, {}) if self.facts else {}
        return Track(files=files, tensors=tensors, model=model_facts(tensors, assets))

    def check_names(self, assignment: Assignment, names: Iterable[str]) -> None:
        """InvalidInput unless the track has what is expected of it."""
        only = len(self.assignments) == 1
        if self.expected is not None and (only or assignment.walk.track == MAIN_TRACK):
            check_coverage(names, self.expected, assignment.walk.ties, self.naming.dropped)

    def _producer(self, ranks: Ranks) -> dict[str, Any]:
        removed = {part for assignment in self.assignments for part in assignment.walk.removed}
        return {
            "ckptsync": __version__,
            "torch": str(torch.__version__),
            "world_size": ranks.world_size,
            "writers": self.config.writers,
            "removed_from_names": sorted(removed),
            "dropped": list(self.naming.dropped),
            "ties": self.config.ties,
        }


def refuse_nothing(tensors: Sized) -> None:
    """InvalidInput for a version without tensors."""
    if not len(tensors):
        raise InvalidInput("there is nothing to publish: the source has no tensors")


def _with_ties(stored: Mapping[str, TensorEntry], ties: Mapping[str, str]) -> tuple[TensorEntry, ...]:
    replace = msgspec.structs.replace
    entries = dict(stored)
    for alias, first in ties.items():
        own = entries.get(alias)
        entries[alias] = replace(own or replace(entries[first], name=alias, file=""), alias_of=first)
    return tuple(entries.values())
