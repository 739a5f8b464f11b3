"""What one call costs this process: wall and CPU seconds, and how far its peak of resident memory grew.

Only the standard library, since the other environment's process imports it too.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OURS = "ckptsync"
"""The way that the others' ratios are to."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One call. `parts` are seconds (or bytes) that it told of itself, such as `stall` and `pause`."""

    wall: float
    cpu: float
    peak: int
    parts: dict[str, float] = field(default_factory=dict)


def take(call: Callable[[], Mapping[str, float] | None]) -> Taken:
    gc.collect()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # VmHWM starts again from what is resident now
    before, cpu, wall = resident("VmRSS"), time.process_time(), time.perf_counter()
    parts = call() or {}
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Taken(wall, cpu, max(0, resident("VmHWM") - before), dict(parts))


def resident(field_: str) -> int:
    """Bytes, from /proc/self/status."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field_))


@dataclass(frozen=True, slots=True)
class Row:
    """One way to do one task at one place: medians over the rounds, and medians of the rounds' ratios to ours."""

    task: str
    place: str
    way: str
    lacks: str
    """What ckptsync does here and this way does not."""

    gb: float
    wall: float
    cpu: float
    peak: float
    parts: dict[str, float]
    wall_ratio: float
    """Its wall time over ours in the same round: above 1, ours is faster."""

    cpu_ratio: float
    part_ratios: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def row(task: str, place: str, way: str, lacks: str, gb: float, own: list[Taken], base: list[Taken]) -> Row:
    names = own[0].parts
    return Row(
        task, place, way, lacks, gb,
        wall=_median(t.wall for t in own),
        cpu=_median(t.cpu for t in own),
        peak=_median(t.peak for t in own),
        parts={name: _median(t.parts[name] for t in own) for name in names},
        wall_ratio=_median(t.wall / b.wall for t, b in zip(own, base, strict=True)),
        cpu_ratio=_median(t.cpu / b.cpu for t, b in zip(own, base, strict=True) if b.cpu),
        part_ratios={
            name: _median(t.parts[name] / b.parts[name] for t, b in zip(own, base, strict=True))
            for name in names if base[0].parts.get(name)
        },
    )  # fmt: skip


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return round(statistics.median(found), 4) if found else 0.0


def turns(names: list[str], rounds: int) -> Iterable[str]:
    """Every round has each name once, and begins with another one."""
    for number in range(rounds):
        at = number % len(names)
        yield from names[at:] + names[:at]
