"""What is refused before any engine is paused: a version that does not fit one, or is not newer than what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from ..engine import EngineStatus
from ..errors import CkptSyncError, OutOfOrder, SchemaMismatch
from ..manifest import MAIN_TRACK, TensorSpec
from ..schema import differences
from .base import Delivery, SyncEngine

REMEDY = (
    "it came from another channel, or from a newer attempt. Go on in that channel, or ask for it with "
    "WeightSync(allow_older=True)"
)


@runtime_checkable
class TellsSchema(Protocol):
    """An engine that can say which tensors it needs."""

    def schema(self) -> Mapping[str, TensorSpec] | None: ...


def check_fits(engine: SyncEngine, delivery: Delivery) -> None:
    """SchemaMismatch, with counts and first names. An engine that tells no schema is not checked, nor is an adapter,
    whose tensors are not the model's, nor tracks, which the engines that take them check by themselves."""
    if delivery.kind != "full" or MAIN_TRACK not in delivery.specs or not isinstance(engine, TellsSchema):
        return
    needed = engine.schema()
    if needed is None:
        return
    provided = {spec.name: spec for spec in delivery.specs[MAIN_TRACK]}
    ties = delivery.ties[MAIN_TRACK]
    provided |= {name: replace(provided[first], name=name) for name, first in ties.items()}
    problems = differences(provided, ties, needed, allow_cast=delivery.allow_cast)
    if problems:
        raise SchemaMismatch(f"{delivery.label} does not fit {engine.name}: {'; '.join(problems)}")


def check_newer(delivery: Delivery, found: Mapping[str, EngineStatus | CkptSyncError]) -> None:
    """OutOfOrder if an engine reports this very number, which was never sent, a newer one, or any before the channel
    had one: a trainer that is started again after a refusal has a newer epoch, and its first version would go out."""
    for name, said in found.items():
        holds = said.version if isinstance(said, EngineStatus) else None
        if holds is None or delivery.allow_older:
            continue
        if holds >= delivery.version:
            raise OutOfOrder(f"{delivery.label} is not newer than {holds.label}, which {name} holds: {REMEDY}")
        if delivery.blank and holds.epoch > 0:  # no trainer has epoch 0: a label that a person gave a base model
            raise OutOfOrder(f"{name} holds {holds.label}, and no version of this channel was ever sent: {REMEDY}")
