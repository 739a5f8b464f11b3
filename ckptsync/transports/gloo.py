"""Broadcast over gloo into the embedded engine server: the NCCL protocol's shape, on CPUs.

HTTP says what comes (`wire`), the tensors come over a group of the trainer's rank 0 and all receivers. Made for tests,
demos and small models on CPUs: it is exact, and it is not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import msgspec

from ..digest import digest
from ..errors import InvalidInput, ProofFailed, VersionExists
from ..lane import once
from ..manifest import TensorSpec
from ..shards.tensors import tensor_bytes
from ..version import VersionId
from .base import Bucket, Delivery, Sending, SyncEngine
from .control import Control, url_of
from .pair import Pair, meeting_place
from .wire import Finish, Finished, Join, Names, Start, Started, content_of

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""For an engine to say why it left a broadcast."""


class Gloo:
    """`host`: this machine's address, as the engines see it. `seconds`: how long a call or a broadcast may take."""

    name = "gloo"
    pauses = True

    def __init__(self, *, host: str = "127.0.0.1", seconds: float = 60.0) -> None:
        if not seconds > 0:
            raise InvalidInput(f"seconds={seconds!r}: must be greater than 0")
        self._host, self._seconds = host, seconds
        self._control = Control()
        self._sent: tuple[VersionId, str] | None = None
        """The version that was sent last, and its content digest: known from its last bucket on."""

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        """Whether every engine has an address. Whether it receives is found out by `start`, which touches nothing."""
        without = [engine.name for engine in engines if not url_of(engine)]
        return f"{', '.join(without)} has no url" if without else None

    def send(self, sending: Sending) -> None:
        """The group is made anew each time: a broken one cannot be told from a good one before it is used."""
        held = self._start(sending) if sending.is_sender else {}
        receivers = [engine for engine in sending.engines if not held.get(engine.name)] if sending.is_sender else []
        pair = self._meet(receivers) if receivers else None
        try:
            self._send(sending, held, receivers, pair)
        except BaseException:
            if pair is not None:
                pair.abort()  # an engine that waits for what another one broke off is free for files at once
            raise

    def close(self) -> None:
        """Let go of connections."""
        self._control.close()

    # -- inside: on rank 0 -------------------------------------------------------------------------------------------

    def _send(
        self, sending: Sending, held: Mapping[str, str], receivers: Sequence[SyncEngine], pair: Pair | None
    ) -> None:
        sending.enter("bucket")
        digests: dict[str, dict[str, str]] = {track: {} for track in sending.delivery.specs}
        for bucket in sending.delivery.buckets():
            if pair is not None:
                sending.touch(*receivers)
                self._carry(bucket, receivers, pair)
            if sending.is_sender:
                digests[bucket.track] |= {name: digest(tensor_bytes(tensor)) for name, tensor in bucket.tensors}
            del bucket
        sending.enter("finish")
        if sending.is_sender:
            content = content_of(*_layout(sending.delivery), digests)
            self._sent = (sending.delivery.version, content)
            _check_held(sending.delivery.version, content, held)
            self._finish(sending.delivery.label, content, receivers)

    def _start(self, sending: Sending) -> dict[str, str]:
        """Engine -> the digest under which it holds the version already. What is refused here has touched nothing."""
        delivery = sending.delivery
        specs, ties = _layout(delivery)
        known = self._sent[1] if self._sent and self._sent[0] == delivery.version else ""
        body = Start(
            version=delivery.version, specs=specs, ties=ties, kind=delivery.kind, digest=known,
            allow_older=delivery.allow_older,
        )  # fmt: skip
        answers = self._all(sending.engines, lambda engine: self._post(engine, "start", body, Started))
        return {engine.name: answer.held for engine, answer in zip(sending.engines, answers, strict=True)}

    def _meet(self, receivers: Sequence[SyncEngine]) -> Pair:
        store, size = meeting_place(self._host), len(receivers) + 1
        places = {engine.name: at for at, engine in enumerate(receivers, 1)}

        def join(engine: SyncEngine) -> None:
            body = Join(self._host, store.port, places[engine.name], size, self._seconds)
            self._post(engine, "join", body, dict)

        return self._beside(receivers, join, lambda: Pair(store, 0, size, self._seconds))

    def _carry(self, bucket: Bucket, receivers: Sequence[SyncEngine], pair: Pair) -> None:
        body = Names(bucket.track, [name for name, _ in bucket.tensors])

        def broadcast() -> None:
            for _, tensor in bucket.tensors:
                pair.broadcast(tensor.detach().cpu().contiguous())

        self._beside(receivers, lambda engine: self._post(engine, "bucket", body, dict), broadcast)

    def _finish(self, label: str, content: str, receivers: Sequence[SyncEngine]) -> None:
        body = Finish(label, content)
        answers = self._all(receivers, lambda engine: self._post(engine, "finish", body, Finished))
        for engine, answer in zip(receivers, answers, strict=True):
            if answer != Finished(label, content):
                raise ProofFailed(
                    f"{engine.name} reads back {answer.label} {answer.digest}, sent was {label} {content}"
                )

    def _post(self, engine: SyncEngine, step: str, body: msgspec.Struct, answer: type[T]) -> T:
        return self._control.post(engine, f"/receive/{step}", body, answer, seconds=self._seconds)

    def _all(self, engines: Sequence[SyncEngine], call: Callable[[SyncEngine], T]) -> list[T]:
        with ThreadPoolExecutor(max(1, len(engines))) as pool:
            return list(pool.map(call, engines))

    def _beside(self, engines: Sequence[SyncEngine], call: Callable[[SyncEngine], object], own: Callable[[], T]) -> T:
        """`own` here while each engine is called. The first failure is raised, an engine's own words before those of a
        broadcast that it left: what waits for the other side then ends by its own deadline, in a side thread."""
        calls: list[Future[Any]] = [once("ckptsync-call", partial(call, engine)) for engine in engines]
        mine = once("ckptsync-gloo", own)
        wait([*calls, mine], return_when=FIRST_EXCEPTION)
        if mine.done() and mine.exception() is not None:
            wait(calls, GRACE_SECONDS, return_when=FIRST_EXCEPTION)
        for future in (*calls, mine):
            if future.done():
                future.result()
        return mine.result()


def _layout(delivery: Delivery) -> tuple[dict[str, list[TensorSpec]], dict[str, dict[str, str]]]:
    specs = {track: list(listed) for track, listed in delivery.specs.items()}
    return specs, {track: dict(ties) for track, ties in delivery.ties.items()}


def _check_held(version: VersionId, content: str, held: Mapping[str, str]) -> None:
    for name, digest_there in held.items():
        if digest_there and digest_there != content:
            raise VersionExists(f"{name} holds {version} with other content: a version keeps that of its first send")
