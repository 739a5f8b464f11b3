"""In-process copy: the engine is a sibling module of the trained one, on every rank or on rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from .base import LocalEngine, Sending, SyncEngine
from .targets import Targets


class ModuleCopy:
    """Full weights, and the tensors of a LoRA adapter if the sibling has one of the same name. Engines are
    `LocalEngine`s, such as `watchers.engines.module.ModuleEngine`: given on every rank under the same name.

    Each copied tensor is read back and compared, bit for bit, while both are at hand.
    """

    name = "module"
    pauses = True

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        """Whether every engine is in this process."""
        away = [engine.name for engine in engines if not isinstance(engine, LocalEngine)]
        return f"{', '.join(away)} is not in this process" if away else None

    def send(self, sending: Sending) -> None:
        """SchemaMismatch before anything is touched, for whichever engine and track."""
        delivery = sending.delivery
        engines = [engine for engine in sending.engines if isinstance(engine, LocalEngine)]
        targets = [Targets(e.modules, delivery.specs, delivery.ties, kind=delivery.kind, name=e.name) for e in engines]
        sending.ranks.agree()
        sending.touch(*engines)
        for engine in engines:
            engine.begin()
        sending.enter("bucket")
        for bucket in delivery.buckets(everywhere=True):
            for target in targets:
                target.copy(bucket.track, bucket.tensors)
            del bucket
        sending.enter("finish")
        for target in targets:
            target.check_complete()
        sending.ranks.agree()
        for engine in engines:
            engine.hold(delivery.label)

    def close(self) -> None:
        """Nothing is held."""
