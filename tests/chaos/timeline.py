"""A run as one picture: above a lane for each actor, with its faults and how it answered, below which version each
engine served while others were published."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ckptsync.version import parse_label

from .record import Answer, Report

COLOURS = {
    "kill": "#d55e00",
    "freeze": "#0072b2",
    "cut": "#cc79a7",
    "slow": "#e69f00",
    "fill": "#785ef0",
    "replace": "#222222",
}
"""Of each kind of fault: Okabe and Ito's palette, which the colour-blind can tell apart."""

ANSWERS = {"a version": "#cfe8d5", "base weights": "#fff0a8", "no answer": "#d9d9d9"}
ENGINES = ["#0072b2", "#009e73", "#56b4e9", "#d55e00"]
GROUPS = (
    ("trainer", ("trainer", "trainer rank 0", "link t0", "trainer rank 1", "link t1")),
    ("store", ("store", "link store")),
    ("host one", ("embedded-1", "embedded-2", "fleet", "disk one", "link one")),
    ("host two", ("sglang", "embedded-3", "single", "link two")),
    ("host far", ("embedded-far", "mirror", "distant", "disk far", "link far")),
)


def draw(report: Report, path: str) -> None:
    """Write a PNG of less than 200 kB for ten minutes."""
    lanes = _lanes(report)
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6}
    with plt.rc_context(style):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(14, 2.6 + 0.23 * len(lanes)), sharex=True, height_ratios=[0.23 * len(lanes), 2.6],
            layout="constrained",
        )  # fmt: skip
        _draw_lanes(above, report, lanes)
        _draw_versions(below, report)
        figure.suptitle(_title(report), x=0.01, ha="left", fontsize=10, fontweight="bold")
        figure.savefig(path, dpi=100)
        plt.close(figure)


def _title(report: Report) -> str:
    committed, epochs = len(report.source.versions), len(report.source.epochs)
    return (
        f"{len(report.happened)} faults in {report.seconds:.0f} s (seed {report.seed}): {committed} versions in "
        f"{epochs} epochs, {sum(answer.label is not None for answer in report.answers)} answers"
    )


def _lanes(report: Report) -> list[str]:
    """From top to bottom; what does not exist in this run has none."""
    there = {fault.actor for fault in report.schedule} | set(report.replicas)
    return [name for _, names in GROUPS for name in names if name in there]


def _draw_lanes(axes: Axes, report: Report, lanes: Sequence[str]) -> None:
    for name in report.replicas:
        mine = [answer for answer in report.answers if answer.replica == name]
        for start, end, how in _stretches(mine):
            axes.barh(lanes.index(name), end - start, left=start, height=0.9, color=ANSWERS[how], linewidth=0)
        loads = [attempt.at for attempt in report.attempts if (attempt.engine, attempt.state) == (name, "serving")]
        lane = lanes.index(name)
        axes.vlines(loads, lane - 0.42, lane + 0.42, color="#2f7d46", linewidth=0.5)
    for fault in report.happened:
        axes.barh(
            lanes.index(fault.actor), max(fault.seconds, report.seconds / 700), left=fault.at, height=0.55,
            color=COLOURS[fault.kind], linewidth=0,
        )  # fmt: skip
    axes.axvline(report.seconds, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for edge in _edges(lanes):
        axes.axhline(edge, color="#999999", linewidth=0.6)
    axes.legend(handles=list(_legend(report)), ncols=11, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False)


def _draw_versions(axes: Axes, report: Report) -> None:
    """Numbers go on from one epoch to the next, so that they tell how far an engine is behind."""
    told = sorted((version.at, _number(version.label)) for version in report.source.versions)
    last = max((answer.at for answer in report.answers), default=report.seconds)
    times, numbers = [at for at, _ in told], [number for _, number in told]
    axes.step([*times, last], [*numbers, numbers[-1]], where="post", color="black", linewidth=1, label="published")
    for name, colour in zip(report.replicas, ENGINES, strict=False):
        xs, ys = _line([answer for answer in report.answers if answer.replica == name])
        axes.plot(xs, ys, color=colour, linewidth=1.1, drawstyle="steps-post", label=f"served by {name}")
    starts: dict[int, float] = {}
    for version in report.source.versions:
        epoch = (parse_label(version.label) or (0, 0))[0]
        starts[epoch] = min(version.at, starts.get(epoch, version.at))
    for epoch, start in starts.items():
        if start > 0:
            axes.axvline(start, color="#bbbbbb", linewidth=0.6, zorder=0)
            place = axes.get_xaxis_transform()
            axes.text(start, 1.0, f" e{epoch}", transform=place, va="top", fontsize=6, color="#777777")
    axes.set_xlim(-2, last + 1)
    axes.axvline(report.seconds, color="black", linewidth=0.8, linestyle=":", zorder=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("version number")
    axes.set_xlabel("seconds; the faults are over at the dotted line, and then the trainer stops")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.95), frameon=False)


def _stretches(answers: Sequence[Answer]) -> Iterator[tuple[float, float, str]]:
    """(from, to, how it answered) of one engine."""
    how = [("no answer" if a.label is None else "a version" if a.label else "base weights") for a in answers]
    start = 0
    for index in range(1, len(answers) + 1):
        if index == len(answers) or how[index] != how[start]:
            yield answers[start].at, answers[min(index, len(answers) - 1)].at, how[start]
            start = index


def _line(answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """Times and version numbers of one engine, with a hole where it did not answer or was on its base weights."""
    return [a.at for a in answers], [float(_number(a.label)) if a.label else math.nan for a in answers]


def _edges(lanes: Sequence[str]) -> Iterator[float]:
    """Between the groups."""
    group = {name: head for head, names in GROUPS for name in names}
    yield from (index + 0.5 for index, (a, b) in enumerate(pairwise(lanes)) if group[a] != group[b])


def _legend(report: Report) -> Iterator[Patch | Line2D]:
    slow = f"slow ({report.links})" if report.links != "none" else "slow"
    for kind, colour in COLOURS.items():
        yield Patch(color=colour, label=slow if kind == "slow" else kind)
    for how, colour in ANSWERS.items():
        yield Patch(color=colour, label=how)
    yield Line2D([], [], color="#2f7d46", linewidth=1, label="a load")


def _number(label: str) -> int:
    return int(re.sub(r".*v", "", label) or 0)
