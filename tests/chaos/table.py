"""A run in words and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from .record import Report


def table(report: Report, verdict: dict[str, list[str]]) -> str:
    return "\n".join([*_happened(report), "", *_engines(report), "", *_laws(verdict)])


def _happened(report: Report) -> Iterator[str]:
    told = Counter(publish.event for publish in report.publishes)
    kinds = Counter(version.kind for version in report.source.versions)
    faults = Counter(fault.kind for fault in report.happened)
    yield f"{report.seconds:.0f} s, seed {report.seed}, slow links by {report.links}"
    yield f"took        {', '.join(f'{phase} {seconds:.0f} s' for phase, seconds in report.took.items())}"
    yield f"faults      {_counts(faults)}"
    committed, epochs = len(report.source.versions), len(report.source.epochs)
    yield f"versions    {committed} committed ({_counts(kinds)}) in {epochs} epochs"
    yield f"trainers    {_counts(told)}; replaced while frozen: {_counts(Counter(report.replaced)) or 'none'}"
    yield f"mirror      {len(report.mirror.seen)} versions seen, {len(report.mirror.versions)} kept"


def _engines(report: Report) -> Iterator[str]:
    yield f"{'engine':14}{'answers':>9}{'no answer':>11}{'base':>6}{'versions':>10}"
    for name in report.replicas:
        mine = [answer for answer in report.answers if answer.replica == name]
        labels = [answer.label for answer in mine if answer.label]
        base = sum(answer.label == "" for answer in mine)
        yield f"{name:14}{len(labels):9}{len(mine) - len(labels) - base:11}{base:6}{len(set(labels)):10}"
    yield ""
    yield f"{'watcher':14}{'loads':>9}{'others':>11}   {'pause: median, longest'}"
    for name in dict.fromkeys(attempt.watcher for attempt in report.attempts):
        mine = [attempt for attempt in report.attempts if attempt.watcher == name]
        loads = [attempt.pause_seconds for attempt in mine if attempt.state == "serving"]
        others = Counter(attempt.state for attempt in mine if attempt.state != "serving")
        pauses = f"{_middle(loads):.3f} s, {max(loads, default=0):.3f} s"
        yield f"{name:14}{len(loads):9}{sum(others.values()):11}   {pauses}"


def _laws(verdict: dict[str, list[str]]) -> Iterator[str]:
    for law, broken in verdict.items():
        yield f"{'BROKEN' if broken else 'ok':8}{law}"
        yield from (f"        - {each}" for each in broken[:5])
        if len(broken) > 5:
            yield f"        - and {len(broken) - 5} more"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
