"""The contract of a transport: one way to bring a version from the ranks of a trainer to engines.

    class Carrier:
        name, pauses = "carrier", True

        def probe(self, engines):                     # on every rank, alone: no collective in here
            return None if pigeons() else "no pigeons"

        def send(self, sending):                      # on every rank, collective
            sending.enter("start")
            if sending.is_sender:                     # rank 0 alone talks to engines
                for engine in sending.engines:
                    sending.touch(engine)             # before the first call that may change its weights
                    begin(engine.url)
            sending.enter("bucket")
            for bucket in sending.delivery.buckets():     # in lockstep; whole tensors, on rank 0
                sending.ranks.run(lambda: carry(bucket), "a bucket")
            sending.enter("finish")
            if sending.is_sender:
                for engine in sending.engines:
                    finish(engine.url, label=sending.delivery.label)    # the label goes with the data

        def close(self): ...

A transport only sends. Which transport, when, to which engines, what a failure leaves dirty and who is resumed is the
chain's business (`chain.py`), and it is the same on every rank.

**Errors.** `send` may raise anything, on any rank; the chain asks what was touched, not what was raised. Nothing
touched: the engines are resumed as they were, and the next transport takes over at once. Touched: those engines are
*dirty*, and stay paused until a complete load, from files or by a full resend, is confirmed. Transient are
TransportUnavailable, EngineUnavailable and StoreUnavailable: tried again, with back-off, before the next takes over;
but not if an engine let the time for its answer pass (`EngineError.silent`), which the same sync does not ask again. An
error against the caller (InvalidInput, Conflict and their kinds, SchemaMismatch) ends the sync: no other way would do
better.

**Ranks.** Every rank calls `send` with the same delivery. What can fail on one rank alone comes before a consensus,
what blocks in a collective goes through `sending.ranks.run`; `Delivery.buckets` begins each bucket with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from ..engine import EngineStatus
from ..errors import EngineUnavailable, StoreUnavailable, TransportUnavailable
from ..manifest import Kind, TensorSpec
from ..ranks import Ranks
from ..version import VersionId
from .walked import Walked, mark

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..channel import Channel
    from ..export.source import Walk
    from ..published import Published

BUCKET_BYTES = 512 << 20
"""Default size of a bucket, in bytes on the wire."""

TRANSIENT = (TransportUnavailable, EngineUnavailable, StoreUnavailable)

Phase = Literal["probe", "pause", "start", "bucket", "finish", "confirm"]
"""Where a send is. The label travels with `finish`; `pause` and `confirm` are the chain's own."""


class SyncEngine(Protocol):
    """What the chain asks of an engine, whichever way its weights go. The HTTP adapters of `watchers.engines` have it,
    with a `url` for the transports; so has an `Engine` in this process. Asked on rank 0 only, in side threads. One that
    knows a deadline says so by `EngineError.silent`."""

    @property
    def name(self) -> str:
        """Unique among the engines of a sync."""
        ...

    def status(self) -> EngineStatus:
        """The label as the engine reports it: empty, never a fallback, where it has none."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class LocalEngine(SyncEngine, Protocol):
    """An engine in the trainer's own process, one on every rank, under one name: asked on every rank."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Track -> the live module that computes."""
        ...

    def begin(self) -> None:
        """From here on it may hold a mix: it has no label."""
        ...

    def hold(self, label: str) -> None:
        """It holds all of this version."""
        ...


class Bucket(NamedTuple):
    """Some tensors of one track, to be let go before the next bucket is asked for."""

    track: str
    tensors: list[tuple[str, torch.Tensor]]
    """Whole, in the dtype on the wire, on the device where the model has them (a source's: on the CPU). Empty on ranks
    that do not get them. May be the live parameters themselves: not to be written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One version that is to reach engines; equal on every rank. Can be walked again, for a resend or another way."""

    version: VersionId
    kind: Kind = "full"
    step: int | None = None
    walks: Sequence[Walk]
    adapter_config: bytes | None = None
    """PEFT's `adapter_config.json`, of kind `adapter`, whose tensors have PEFT's own names."""

    ranks: Ranks
    bucket_bytes: int = BUCKET_BYTES

    to_files: Callable[[str], Published]
    """Collective. Publish it to the channel under its identity; takes the name of the transport that it went by."""

    channel: Channel | None = None
    """On rank 0."""

    allow_older: bool = False
    """Send it to an engine that holds a newer version, or one of another channel."""

    blank: bool = False
    """The channel has never had a version: whichever an engine reports came from another one."""

    allow_cast: bool = False
    """Plain floats may be of another dtype than the engine's."""

    walked: Walked = field(default_factory=Walked, repr=False)

    @property
    def label(self) -> str:
        """`e1-v42`: what an engine reports from the moment it holds the version."""
        return self.version.label

    @property
    def specs(self) -> Mapping[str, tuple[TensorSpec, ...]]:
        """Track -> what its buckets will hold, in order: name, safetensors dtype, full shape. Costs nothing."""
        return {walk.track: walk.specs or () for walk in self.walks}

    @property
    def ties(self) -> Mapping[str, Mapping[str, str]]:
        """Track -> further names of tied weights -> the name under which their bytes are sent, once."""
        return {walk.track: walk.ties for walk in self.walks}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, on the wire."""
        return sum(spec.nbytes for specs in self.specs.values() for spec in specs)

    def buckets(self, *, everywhere: bool = False) -> Iterator[Bucket]:
        """Collective. Every tensor, bucket by bucket, gathered when its bucket is asked for and not before.

        A bucket ends before the tensor that would take it over `bucket_bytes`; a larger tensor has one to itself. Cast
        before the gather. All ranks get the same buckets at the same time: with their tensors on rank 0, or
        `everywhere`, as for handles of each rank's own GPU. Each begins with a consensus of all ranks: a rank that
        failed since the last one raises there on all. To be walked to its end, or until it raises, on every rank.

        VersionExists at the end, on a rank that has the tensors, unless every whole walk gave the same.
        """
        marks = []
        for walk in self.walks:
            for tensors in walk.whole(self.ranks, self.bucket_bytes, everywhere):
                marks += [mark(tensor) for _, tensor in tensors]
                yield Bucket(walk.track, tensors)
                del tensors
        self.walked.check(marks, self.label)


@dataclass(slots=True, kw_only=True)
class Sending:
    """One attempt to bring a delivery to some engines by one transport: what the chain learns of it, on one rank."""

    delivery: Delivery
    engines: Sequence[SyncEngine]
    """Those that do not hold the version yet, all paused if the transport `pauses`. The same on every rank."""

    phase: Phase = "start"
    touched: set[str] = field(default_factory=set)
    heard: set[str] = field(default_factory=set)
    """Engines that answered a transport which does not pause: no longer silent, if they were."""

    @property
    def ranks(self) -> Ranks:
        return self.delivery.ranks

    @property
    def is_sender(self) -> bool:
        """Whether this rank talks to the engines."""
        return self.ranks.is_writer

    def enter(self, phase: Phase) -> None:
        """Say where the send is, for errors."""
        self.phase = phase

    def touch(self, *engines: SyncEngine) -> None:
        """From here on these may hold a mix. To be called before the first request that may change their weights; not
        for one that the engine answers without having begun, such as a refused session."""
        self.touched.update(engine.name for engine in engines)


@runtime_checkable
class Selective(Protocol):
    """A transport that does not carry every kind of version."""

    def carries(self, delivery: Delivery) -> str | None:
        """None if it carries this one, else why not, as a clause. From the delivery alone, so the same on every rank.
        No engine is paused for what is not carried, and nothing is held against the transport."""
        ...


class Transport(Protocol):
    """One way to bring versions to engines. See the module's docstring for an example."""

    @property
    def name(self) -> str:
        """`vllm_nccl`, for results, logs and errors."""
        ...

    @property
    def pauses(self) -> bool:
        """Whether the chain is to pause the engines before `send` and resume them after it was confirmed. False where
        watchers load: they pause by themselves."""
        ...

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        """None if it can be used for these engines now, else why not, as a clause: `GPU peer access is off`.

        Called on every rank, at start and after failures, and not collective: a rank speaks for itself, and one no is
        enough. Must not touch an engine's weights, and must return within seconds.
        """
        ...

    def send(self, sending: Sending) -> None:
        """Collective. Bring the whole delivery to `sending.engines`, with its label in the same call as the end of the
        data. Returns when every rank of every engine has said that it holds it; the chain reads the labels back.

        Engines that hold this very version already, by a send whose answer was lost, are left as they are.
        """
        ...

    def close(self) -> None:
        """Give groups, buffers and connections back. Idempotent, and harmless when an engine is gone."""
        ...
