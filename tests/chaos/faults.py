"""What begins and ends a fault of each kind, and a run of the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from .record import Fault


class Target(NamedTuple):
    """One that a kind of fault can hit."""

    begin: Callable[[], None]
    end: Callable[[], None]


Targets = Mapping[str, Mapping[str, Target]]
"""Kind -> actor -> target."""


def actors(targets: Targets) -> dict[str, list[str]]:
    return {kind: list(each) for kind, each in targets.items() if each}


def check(schedule: Iterable[Fault], targets: Targets) -> None:
    """ValueError for a recorded schedule with a fault that cannot be had here."""
    for fault in schedule:
        if fault.actor not in targets.get(fault.kind, {}):
            raise ValueError(
                f"{fault.kind} of {fault.actor}: not here. Links and disks need root; else draw a new schedule"
            )


def play(schedule: Iterable[Fault], targets: Targets, began: float) -> list[Fault]:
    """Each fault at its time after `began` (time.time), also while others are under way; returns once all are over.
    What happened: the same faults with the times that they really had, since a server takes its time to come back."""
    faults = sorted(schedule, key=lambda fault: fault.at)
    with ThreadPoolExecutor(16) as pool:
        played: list[Future[Fault]] = []
        for fault in faults:
            time.sleep(max(0.0, began + fault.at - time.time()))
            played.append(pool.submit(_hit, fault, targets[fault.kind][fault.actor], began))
    return [future.result() for future in played]


def _hit(fault: Fault, target: Target, began: float) -> Fault:
    at = time.time() - began
    target.begin()
    try:
        time.sleep(max(0.0, fault.at + fault.seconds - (time.time() - began)))
    finally:
        target.end()
    return Fault(at, time.time() - began - at, fault.kind, fault.actor)
