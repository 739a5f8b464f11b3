"""Paired timing, and the one line that each benchmark contributes to the table of the README."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the README's table."""

    what: str
    ours: str
    against: str
    """What it was measured against, in the same run."""

    result: str
    """The ratio, or the figure where there is no other side."""

    target: str


@dataclass(frozen=True, slots=True)
class Row:
    """One contender of one task; medians over the rounds."""

    task: str
    contender: str
    gb_per_s: float
    ratio: float
    """Plain time over this contender's, round by round."""

    cpu_s_per_gb: float


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(
    task: str, gb: float, rounds: int, contenders: dict[str, Callable[[], None]], before: Callable[[], None]
) -> list[Row]:
    """Every round runs each contender once, in turning order; the first contender is the base of the ratios."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before()
            times[name].append(measured(contenders[name]))
    plain = [wall for wall, _ in next(iter(times.values()))]
    return [
        Row(
            task,
            name,
            round(gb / statistics.median(wall for wall, _ in runs), 3),
            round(statistics.median(base / wall for base, (wall, _) in zip(plain, runs, strict=True)), 3),
            round(statistics.median(cpu for _, cpu in runs) / gb, 3),
        )
        for name, runs in times.items()
    ]


def load() -> str:
    """Ours needs some CPU and plain O_DIRECT almost none: on a busy machine a ratio measures that."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
