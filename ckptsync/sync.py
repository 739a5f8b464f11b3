"""Weights to engines by the best way that works now, and one version counter whichever way they went.

    sync = ckptsync.WeightSync(                          # on every trainer rank
        transports=[VllmIpc(...), Checkpoint(wait=60)], channel="s3://bucket/run1", engines=[VllmEngine(url)],
        persist_every=10, dtype=torch.bfloat16,
    )
    for step in ...:
        train(model)
        done = sync.sync(model, step=step)               # collective
        log(done.version, done.transport)                # e1-v42 vllm_ipc

The counter is the channel's: `(epoch, number)`, claimed and fenced like any publisher's, so a version by IPC and the
next one by files are told apart, ordered and labelled alike, and a trainer that was superseded can send by no way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from . import logs
from .assets import Folders, folders_of
from .background import BackgroundPublish
from .channel import Channel
from .config import PublisherConfig, with_overrides
from .engine import EngineStatus
from .errors import CkptSyncError, InvalidInput
from .export.source import Publishable, models_of
from .manifest import Kind
from .opening import Content, open_walks
from .publish import Publisher
from .published import Published
from .ranks import Ranks
from .release import refuse_nothing
from .shards.plan import check_specs
from .store.base import Store
from .transports.base import BUCKET_BYTES, Delivery, SyncEngine, Transport
from .transports.chain import Chain, Failure, Patience
from .transports.engines import Engines
from .transports.files import FileVersions, check_facts
from .transports.handover import FILES
from .version import VersionId

log = logs.get(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """What one sync did; equal on every rank."""

    version: VersionId
    transport: str
    """The one that brought it. `checkpoint`: it is in the channel, and watchers load it."""

    confirmed: tuple[str, ...]
    """Engines that report the version, and compute with it."""

    behind: Mapping[str, str]
    """Engine -> what it reports instead: another label, that it is paused, or why it says nothing. It is loading still,
    or away, or was left dirty."""

    dirty: tuple[str, ...]
    """Of those, the ones that are left paused since their weights may be mixed."""

    caught_up: tuple[str, ...]
    """Engines that were behind the sync before, such as restarted ones, and are not any more."""

    failures: tuple[Failure, ...]
    """What was tried before, in order. Empty when the first transport worked."""

    seconds: float
    file: Published | BackgroundPublish | None = field(default=None, repr=False)
    """The version in the channel, complete or on its way; None if this one has no files, or could not have."""


class WeightSync:
    """Brings a model to engines and counts its versions. Every method is collective: call it on every rank.

    `transports`     in order of preference; `Checkpoint` last, unless there is to be no way back to files
    `channel`        root of the channel: its counter, its fence, and where file versions go
    `engines`        adapters, the same on every rank; none if only watchers know them
    `persist_every`  after so many versions without files, the next one is also written to the channel, in the
                     background: for late joiners and for resuming. None: only when `Checkpoint` brings one
    `bucket_bytes`   bytes that cross to the engines at a time, the tensor that would exceed it not included
    `patience`       how long to keep to a transport that fails
    `allow_older`    send to engines that hold a newer version, or this number of another channel. Otherwise that is
                     OutOfOrder
    `allow_cast`     plain floats may be of another dtype than in the checkpoint that an engine was started on
    `config`, `overrides` are the publisher's: dtype, remap, track_prefix, ... and count for every transport
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        channel: str | Store,
        engines: Sequence[SyncEngine] = (),
        persist_every: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        patience: Patience | None = None,
        allow_older: bool = False,
        allow_cast: bool = False,
        config: PublisherConfig | None = None,
        **overrides: Any,
    ) -> None:
        if persist_every is not None and (isinstance(persist_every, bool) or persist_every < 1):
            raise InvalidInput(f"persist_every={persist_every!r}: must be 1 or more, or None")
        if isinstance(bucket_bytes, bool) or bucket_bytes < 1:
            raise InvalidInput(f"bucket_bytes={bucket_bytes!r}: must be greater than 0")
        self.config = with_overrides(config or PublisherConfig(), overrides)
        self._ranks, self._bucket_bytes = Ranks(timeout=self.config.timeout), bucket_bytes
        with self._ranks.together():  # before an epoch is claimed
            self._engines = Engines(engines, self._ranks)
            self._chain = Chain(transports, self._engines, self._ranks, patience or Patience())
        self._publisher = Publisher(channel, config=self.config)
        self._files = FileVersions(self._publisher, every=persist_every)
        if all(transport.pauses for transport in transports):
            self._engines.adopt_paused()
        self._allow_older, self._allow_cast = allow_older, allow_cast
        with self._ranks.together():
            self._blank = self._ranks.broadcast(_is_blank(self._publisher.channel))
        self._version: VersionId | None = None
        self._last: VersionId | None = None

    @property
    def version(self) -> VersionId | None:
        """The newest version that every engine has confirmed, as of the last sync; None before the first. Without
        engines, the newest one published."""
        return self._version

    def sync(
        self,
        model: Publishable | None = None,
        *,
        tracks: Mapping[str, Publishable] | None = None,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        assets: Folders | None = None,
        kind: Kind = "full",
        adapter: str = "default",
        merge_lora: bool = False,
        trainer_state: Mapping[str, Any] | None = None,
    ) -> Synced:
        """Bring the model to every engine as the next version. Arguments are those of `Publisher.publish`; `metadata`,
        `assets` and `trainer_state` are for versions that get files. An iterator is refused: it can be walked once.

        Returns on every rank once each engine has confirmed the version and computes with it; by `checkpoint`, once
        the version is complete in the channel, and who has not confirmed is in `behind`.

        An engine that lets the time for an answer pass is not asked again in the same sync, but for files' waiting, and
        the next sync gives it a few seconds for one question: it costs about one timeout of its own, and is `behind`.

        Raises on every rank, the same: NoTransport if no way was left, with each one's reason and the engines that
        stay paused; what is against the caller (InvalidInput, OutOfOrder, SchemaMismatch, ...) with the engines as they
        were, unless the message says otherwise; Fenced; RankTimeout. A version of which nothing was sent uses up no
        number: what an engine refuses, it refuses however often it is asked.
        """
        started = time.monotonic()
        content = Content(models=models_of(model, tracks), kind=kind, adapter=adapter, merge_lora=merge_lora)
        facts = {"step": step, "metadata": metadata, "assets": assets, "trainer_state": trainer_state}
        self._engines.doubt()
        late = self._late()
        delivery = self._delivery(content, facts)
        transport, failures = self._bring(delivery)
        if transport == FILES:
            file: Published | BackgroundPublish | None = self._files.last
        else:
            file = self._files.persist(content, facts, delivery.version, transport)
        return self._report(delivery.version, transport, failures, late, file, started)

    def close(self) -> None:
        """Wait for a file version on its way, then give groups, connections and buffers back. Engines serve on."""
        self._chain.close()
        self._publisher.close()
        self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _delivery(self, content: Content, facts: Mapping[str, Any]) -> Delivery:
        """Everything that can be refused is, before a number is taken or an engine asked."""
        with self._ranks.together():
            check_facts(facts)
            content.check_walks_again()
            lora = content.prepare(self.config)
            walks, _ = open_walks(lora, self.config, self._ranks)
            if self._ranks.is_writer and lora.adapter is None:
                folders_of(facts["assets"], [walk.track for walk in walks])
            for walk in walks:
                if walk.specs is None:
                    raise InvalidInput(
                        "a transform that needs values cannot announce its tensors: publish to files only"
                    )
                check_specs(walk.specs)
                refuse_nothing(walk.specs)
        version = self._publisher.reserve()
        return Delivery(
            version=version, kind=content.kind, step=facts["step"], walks=walks, ranks=self._ranks,
            bucket_bytes=self._bucket_bytes, adapter_config=lora.adapter.config if lora.adapter else None,
            to_files=lambda transport: self._files.publish(content, facts, version, transport),
            channel=self._publisher.channel, allow_older=self._allow_older, allow_cast=self._allow_cast,
            blank=self._blank,
        )  # fmt: skip

    def _bring(self, delivery: Delivery) -> tuple[str, list[Failure]]:
        try:
            self._chain.check_welcome(delivery)
            self._publisher.announce(delivery.version)
            brought = self._chain.bring(delivery)
        except CkptSyncError:
            # Else refusals count up to the label of another channel, and the one after it is "newer" and goes out.
            if self._chain.unsent:
                self._publisher.give_back(delivery.version)
            else:
                self._blank = False
            raise
        self._blank = False
        return brought

    def _late(self) -> list[str]:
        """Engines that do not hold what was brought last: restarted since, say, or still loading it."""
        if self._last is None:
            return []
        late = {name: _says(said) for name, said in self._engines.look().items() if _says(said) != self._last.label}
        for name, says in late.items():
            more = logs.about(self._last, event="engine-behind", engine=name)
            log.warning("%s is behind %s: %s", name, self._last.label, says, extra=more)
        return sorted(late)

    def _report(
        self,
        version: VersionId,
        transport: str,
        failures: Sequence[Failure],
        late: Sequence[str],
        file: Published | BackgroundPublish | None,
        started: float,
    ) -> Synced:
        found, self._last = self._engines.look(), version
        says = {name: _says(said) for name, said in found.items()}
        holds = [name for name, said in says.items() if said == version.label]
        behind = {name: said for name, said in says.items() if name not in holds}
        if not behind:
            self._version = version
        return Synced(
            version=version, transport=transport, confirmed=tuple(holds), behind=behind,
            dirty=tuple(sorted(self._engines.dirty)), caught_up=tuple(name for name in late if name in holds),
            failures=tuple(failures), seconds=self._ranks.broadcast(time.monotonic() - started), file=file,
        )  # fmt: skip


def _is_blank(channel: Channel | None) -> bool:
    """Whether no trainer of the channel has ever given an engine anything; False where nobody looks."""
    return channel is not None and not channel.committed() and channel.newest_sent() is None


def _says(said: EngineStatus | CkptSyncError) -> str:
    """The label, of an engine that computes with it; else what is in the way."""
    if isinstance(said, CkptSyncError):
        return str(said)
    return f"{said.label or 'no version'}{', paused' if said.paused else ''}"
