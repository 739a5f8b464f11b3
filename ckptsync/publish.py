"""Publish weights from the ranks of a trainer: collective, streaming, whole or not at all.

    publisher = Publisher("s3://bucket/run1", dtype=torch.bfloat16)      # on every rank
    for step in ...:
        train(model)
        publisher.publish(model, step=step, assets="path/of/base/model")  # on every rank

Rank 0 decides and writes; the others gather with it and keep nothing. A failure on one rank raises on all,
and then there is no manifest, so no version: readers see the one before.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from . import __version__
from .assets import assets_of, model_facts
from .attempt import Attempt, Stopwatch
from .config import PublisherConfig
from .errors import InvalidInput
from .export.source import Publishable, Walk, open_source
from .ledger import Ledger
from .manifest import MAIN_TRACK, Manifest, TensorEntry, Track, canonical, combined_content, decode
from .ranks import Ranks
from .shards.plan import check_specs, plan_shards
from .store.base import Store
from .version import VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one publish did; equal on every rank."""

    version: VersionId
    nbytes: int
    """Bytes of all files of the version."""

    seconds: dict[str, float]
    """Rank 0's time by phase: `gather` (waiting for tensors), `write` (digest and storage), `commit`."""

    changed: bool
    """False if the content equals the version's before: weights that were meant to change have not."""

    content_digest: str
    manifest: Manifest


class Publisher:
    """Publishes versions to the channel at `root`. Every method is collective: call it on every rank.

    Constructing it claims the next epoch, which fences every older publisher of the channel (they raise
    Fenced at their next publish). `overrides` are fields of PublisherConfig. Only rank 0 ever looks at
    `root`.
    """

    def __init__(self, root: str | Store, *, config: PublisherConfig | None = None, **overrides: Any) -> None:
        self.config = _configured(config or PublisherConfig(), overrides)
        self._ranks = Ranks(timeout=self.config.timeout)
        self._ledger: Ledger | None = None
        with self._ranks.together():
            if self._ranks.is_writer:
                self._ledger = Ledger(root, run_id=self.config.run_id, resumed_from=self.config.resumed_from)
            self.epoch = self._ranks.broadcast(self._ledger.epoch.number if self._ledger else 0)
            """The epoch that this publisher claimed."""

    def publish(
        self,
        model: Publishable,
        *,
        number: int | None = None,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        assets: str | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Published:
        """Publish a module, a state dict, a WeightSource or an iterator of (name, tensor) as a full version.

        All ranks pass the same model in the same order. Returns on every rank once the version is complete
        and durable; readers may see it a moment earlier, and never a part of it.

        `number`: the version's number, by default the last one plus 1. A number of this epoch that is taken
        already is a retry: a no-op for the same content, else VersionExists. `metadata`: anything that is
        JSON. `assets`: a local Hugging Face folder on rank 0 whose config, tokenizer and generation files are
        copied beside the weights; a transformers module brings its config by itself. `progress`: called on
        rank 0 with bytes just written.

        Raises on every rank: InvalidInput and its kinds before anything is written, RanksDisagree, Fenced,
        VersionExists, RankFailed (the failing rank's words; its own error is the cause there), RankTimeout.
        In a single process the store's own errors are raised as such.
        """
        attempt = None
        watch = Stopwatch("gather", "write", "commit")
        try:
            with self._ranks.together():
                walk = self._walk(model)
                outcome = None
                if self._ledger is not None:
                    facts = _Facts.check(step, metadata, assets_of(model, assets, self.config.dtype))
                    attempt = self._ledger.attempt(number, self.config.digest, watch, progress)
                    _write(attempt, walk, facts.assets, self.config.shard_bytes, watch)
                    with watch("commit"):
                        manifest = self._manifest(self._ledger, attempt, walk, facts)
                        outcome = self._ledger.commit(attempt, manifest)
                else:
                    for _ in walk.tensors:
                        raise InvalidInput("a rank that does not write was given a tensor to write")
                return self._report(outcome, watch)
        except BaseException:
            if attempt is not None and not attempt.may_exist:
                attempt.discard()
            raise

    def close(self) -> None:
        """Give the process group back. The epoch stays claimed: a later publisher takes the next one."""
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _walk(self, model: Publishable) -> Walk:
        config = self.config
        walk = open_source(model, self._ranks, dtype=config.dtype, ties=config.ties, bucket_bytes=config.bucket_bytes)
        if walk.specs is not None:
            check_specs(walk.specs)
            _refuse_nothing(walk.specs)
        return walk

    def _manifest(self, ledger: Ledger, attempt: Attempt, walk: Walk, facts: _Facts) -> Manifest:
        tensors = _with_ties(attempt.tensors, walk.ties)
        model = model_facts(tensors, facts.assets)
        tracks = {MAIN_TRACK: Track(files=tuple(attempt.files), tensors=tensors, model=model)}
        return Manifest(
            channel_id=ledger.channel.channel_id,
            epoch=attempt.version.epoch,
            number=attempt.version.number,
            nonce=attempt.nonce,
            run_id=ledger.epoch.run_id,
            created=time.time(),
            producer=self._producer(walk),
            step=facts.step,
            metadata=facts.metadata,
            digest=self.config.digest,
            content_digest=combined_content(tracks),
            tracks=tracks,
        )

    def _producer(self, walk: Walk) -> dict[str, Any]:
        return {
            "ckptsync": __version__,
            "torch": str(torch.__version__),
            "world_size": self._ranks.world_size,
            "removed_from_names": list(walk.removed),
            "ties": self.config.ties,
        }

    def _report(self, outcome: tuple[Manifest, bool] | None, watch: Stopwatch) -> Published:
        sent = None
        if outcome is not None:
            sent = (canonical(msgspec.to_builtins(outcome[0])), outcome[1], watch.seconds)
        received = self._ranks.broadcast(sent)
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


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a version carries beside its weights, checked before the first byte is written."""

    step: int | None
    metadata: dict[str, Any]
    assets: Mapping[str, bytes]

    @classmethod
    def check(cls, step: int | None, metadata: Mapping[str, Any] | None, assets: Mapping[str, bytes]) -> _Facts:
        if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
            raise InvalidInput(f"step={step!r}: must be an int or None")
        try:
            plain = msgspec.json.decode(canonical(dict(metadata or {})))
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidInput(f"metadata must be JSON: {error}") from error
        return cls(step, plain, assets)


def _write(attempt: Attempt, walk: Walk, assets: Mapping[str, bytes], shard_bytes: int, watch: Stopwatch) -> None:
    """Assets, shards, index: everything of a version but the commit record."""
    for name, data in assets.items():
        attempt.put(name, data)
    tensors = watch.over("gather", walk.tensors)
    if walk.specs is not None:
        attempt.write_planned(tensors, plan_shards(walk.specs, max_bytes=shard_bytes))
    else:
        attempt.write_unplanned(tensors, shard_bytes)
    _refuse_nothing(attempt.tensors)
    attempt.write_index()


def _refuse_nothing(tensors: Sized) -> None:
    if not len(tensors):
        raise InvalidInput("there is nothing to publish: the source has no tensors")


def _with_ties(stored: Mapping[str, TensorEntry], ties: Mapping[str, str]) -> tuple[TensorEntry, ...]:
    replace = msgspec.structs.replace
    entries = dict(stored)
    for alias, first in ties.items():
        own = entries.get(alias)
        entries[alias] = replace(own or replace(entries[first], name=alias, file=""), alias_of=first)
    return tuple(entries.values())


def _configured(config: PublisherConfig, overrides: Mapping[str, Any]) -> PublisherConfig:
    try:
        return dataclasses.replace(config, **overrides)
    except TypeError as error:
        raise InvalidInput(f"Publisher has no such setting: {error}") from None
