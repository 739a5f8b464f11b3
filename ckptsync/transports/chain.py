"""Several transports in an order of preference: the first that works now brings the version.

    probe -> pause -> start -> buckets -> finish -> confirm -> resume

What a failure means depends on what it touched, and on nothing else (see `base`): untouched engines are resumed as they
were, touched ones stay paused, and the next transport takes over. Every rank decides the same, since every decision is
taken from what all ranks have told each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential, wait_random

from .. import logs
from ..errors import (
    Conflict,
    EngineError,
    InvalidInput,
    NoTransport,
    RankFailed,
    RanksDisagree,
    RankTimeout,
    SchemaMismatch,
    TransportError,
    TransportFailed,
    TransportUnavailable,
)
from ..ranks import Ranks
from .base import TRANSIENT, Delivery, Phase, Selective, Sending, Transport
from .breaker import Breaker, Lane
from .engines import Engines
from .given import check_transports

log = logs.get(__name__)

FATAL = (InvalidInput, Conflict, RanksDisagree, SchemaMismatch)
"""Against the caller: every other transport would say the same."""

BEFORE_DATA: tuple[Phase, ...] = ("pause", "start")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to keep to a transport that fails."""

    tries: int = 3
    """Attempts of one transport in one sync, if its failures are transient."""

    wait: float = 0.5
    """Seconds before the second attempt, doubled for each further one, with jitter."""

    bench_after: int = 3
    """Syncs in a row that a transport may fail before it is benched."""

    bench_seconds: float = 60.0


class Failure(NamedTuple):
    """One attempt that did not bring the version; equal on every rank."""

    transport: str
    phase: Phase
    touched: tuple[str, ...]
    """Engines that it left dirty, as far as it knew."""

    message: str

    def __str__(self) -> str:
        left = f" (touched: {', '.join(self.touched)})" if self.touched else ""
        return f"{self.transport} at {self.phase}: {self.message}{left}"


Kind = Literal["", "transient", "fatal", "end", "other"]


class _Said(NamedTuple):
    """What one rank knows of a failed attempt. `kind` is empty on a rank that only heard of it."""

    touched: tuple[str, ...]
    phase: Phase
    kind: Kind
    silent: str = ""
    """Address of the engine that let the time for an answer pass."""

    @classmethod
    def of(cls, sending: Sending, own: BaseException | None) -> _Said:
        touched, phase = tuple(sending.touched), sending.phase
        while isinstance(own, RankFailed):  # told over another group, or by another rank
            own = own.__cause__
        if own is None:
            return cls(touched, phase, "")
        return cls(touched, phase, _kind(own), own.silent if isinstance(own, EngineError) else "")


def _kind(error: BaseException) -> Kind:
    if not isinstance(error, Exception):
        return "end"
    return "transient" if isinstance(error, TRANSIENT) else "fatal" if isinstance(error, FATAL) else "other"


def _uncarried(transport: Transport, delivery: Delivery) -> str | None:
    return transport.carries(delivery) if isinstance(transport, Selective) else None


def _ask(transport: Transport, engines: Engines) -> str | None:
    try:
        return transport.probe(engines.all)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's answer
        return f"its probe failed: {type(error).__name__}: {error}"


class Chain:
    """Brings deliveries to engines. Every method is collective."""

    def __init__(self, transports: Sequence[Transport], engines: Engines, ranks: Ranks, patience: Patience) -> None:
        check_transports(transports)
        self.engines, self._ranks, self._patience = engines, ranks, patience
        self._breaker = Breaker(transports, after=patience.bench_after, seconds=patience.bench_seconds)
        self.unsent = True
        """Whether nothing of the last delivery can be anywhere: every attempt ended before its data, and touched no
        engine. The same on every rank."""

    def check_welcome(self, delivery: Delivery) -> None:
        """Before `bring`: OutOfOrder or SchemaMismatch, with every engine as it was, if one of them must not get it."""
        self.unsent = True
        if any(lane.transport.pauses for lane in self._breaker.lanes):
            self.engines.check_welcome(delivery)

    def bring(self, delivery: Delivery) -> tuple[str, list[Failure]]:
        """The transport that brought it, and what failed before. The same on every rank: NoTransport if none did."""
        failures: list[Failure] = []
        for at in self._ranks.broadcast(self._breaker.order()):
            lane = self._breaker.lanes[at]
            if why := _uncarried(lane.transport, delivery):
                failures.append(Failure(lane.name, "probe", (), why))
            elif lane.transport.pauses and self.engines.silent:  # nor is it the transport's failure
                failures.append(Failure(lane.name, "pause", (), self._silence()))
                self.engines.resume()  # others, that were silent in the sync before
            elif self._probed(lane, failures) and self._tried(lane, delivery, failures):
                return lane.name, failures
        raise NoTransport(f"no transport brought {delivery.label}: {'; '.join(map(str, failures))}. {self._left()}")

    def close(self) -> None:
        """Close every transport."""
        for lane in self._breaker.lanes:
            lane.transport.close()

    # -- one transport -------------------------------------------------------------------------------------------------

    def _probed(self, lane: Lane, failures: list[Failure]) -> bool:
        if lane.probed:
            return True
        idle = lane.transport.pauses and not self.engines.all
        said = self._ranks.gather("no engines were given" if idle else _ask(lane.transport, self.engines))
        why = next((f"rank {rank}: {each}" for rank, each in enumerate(said) if each is not None), None)
        if why is not None:
            failures.append(Failure(lane.name, "probe", (), why))
        lane.probed = why is None
        return lane.probed

    def _tried(self, lane: Lane, delivery: Delivery, failures: list[Failure]) -> bool:
        patience = self._patience
        tries = Retrying(
            retry=retry_if_exception_type(TransportUnavailable),
            stop=stop_after_attempt(patience.tries),
            wait=wait_exponential(multiplier=patience.wait) + wait_random(0, patience.wait / 4),
            reraise=True,
        )
        try:
            tries(self._attempt, lane.transport, delivery, failures)
        except TransportError:
            self._breaker.failed(lane)
            return False
        self._breaker.worked(lane)
        return True

    def _attempt(self, transport: Transport, delivery: Delivery, failures: list[Failure]) -> None:
        """TransportUnavailable if it is worth another attempt, TransportFailed if not."""
        # A number that was never sent is held by nobody.
        engines = self.engines.lacking(delivery.version) if failures else self.engines.all
        if self.engines.all and not engines:
            return
        sending = Sending(delivery=delivery, engines=engines)
        try:
            error = self._error_of(transport, sending)
            if error is not None:
                self._settle(transport, sending, error, failures)
        except RankTimeout:
            self.unsent = False
            self.engines.release(sending.touched)
            raise

    def _error_of(self, transport: Transport, sending: Sending) -> BaseException | None:
        try:
            with self._ranks.together():
                self._send(transport, sending)
        except RankTimeout:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, what it touched decides
            return error
        return None

    def _send(self, transport: Transport, sending: Sending) -> None:
        boots: dict[str, str] = {}
        if transport.pauses:
            sending.enter("pause")
            boots = self.engines.take(sending.engines)
        sending.enter("start")
        transport.send(sending)
        if not transport.pauses:
            self.engines.hand_over(sending.engines, sending.heard)
            return
        sending.enter("confirm")
        self.engines.confirm(sending.engines, sending.delivery.label, boots)
        self.engines.resume()

    def _settle(self, transport: Transport, sending: Sending, error: BaseException, failures: list[Failure]) -> None:
        """After a failure that all ranks know of: what was touched is dirty, what was not computes on."""
        own = error if self._ranks.world_size == 1 else error.__cause__
        said = self._ranks.gather(_Said.of(sending, own))
        touched = sorted({name for each in said for name in each.touched})
        # Rank 0 alone talks to engines: others may wait in the first bucket for one that broke off before it.
        early = transport.pauses and said[0].phase in BEFORE_DATA
        self.unsent = self.unsent and early and not touched
        first = next((each for each in said if each.kind), said[0])
        self.engines.soil(touched, sending.delivery.version)
        self.engines.suspect({each.silent for each in said})
        left = self.engines.lacking(sending.delivery.version)
        self.engines.resume()
        if any(each.kind in ("fatal", "end") for each in said):
            raise error
        if touched and not left:
            more = logs.about(sending.delivery.version, event="transport-recovered", transport=transport.name)
            text = "%s: every engine holds %s in spite of: %s"
            log.warning(text, transport.name, sending.delivery.label, error, extra=more)
            return
        failures.append(Failure(transport.name, first.phase, tuple(touched), str(error)))
        more = logs.about(sending.delivery.version, event="transport-failed", transport=transport.name)
        log.warning("%s", failures[-1], extra=more)
        again = first.kind == "transient" and not (transport.pauses and self.engines.silent)
        raise (TransportUnavailable if again else TransportFailed)(str(error)) from error

    def _silence(self) -> str:
        return f"no answer from {'; '.join(f'{name} ({error})' for name, error in self.engines.silent.items())}"

    def _left(self) -> str:
        dirty, held = sorted(self.engines.dirty), sorted(self.engines.held - self.engines.dirty.keys())
        left = [f"Left paused, their weights may be mixed: {', '.join(dirty)}"] if dirty else []
        left += [f"Maybe left paused, as they were, until the next sync: {', '.join(held)}"] if held else []
        return ". ".join(left) or "No engine is left paused"
