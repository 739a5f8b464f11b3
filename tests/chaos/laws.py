"""What must hold of a run, asked of its record alone.

    for law, broken in judge(report).items(): ...

Nothing torn, stale or mislabelled is served; nothing that was acknowledged is lost; and once the faults are over all
is well again without anybody's help.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from ckptsync.epochs import Epoch as Claim
from ckptsync.epochs import live
from ckptsync.version import VersionId, parse_label

from .record import Holding, Report

Law = Callable[[Report], Iterator[str]]


def judge(report: Report) -> dict[str, list[str]]:
    """Law, in words -> how it was broken."""
    return {law: list(broken(report)) for law, broken in LAWS.items()}


def _whole(report: Report) -> Iterator[str]:
    models = {"": report.base, **{version.label: version.model for version in report.source.versions}}
    for answer in report.answers:
        if answer.label is None:
            continue
        if answer.label not in models:
            yield f"{answer.replica} at {answer.at:.1f} s names {answer.label}, which was never committed"
        elif answer.said != models[answer.label]:
            wanted = models[answer.label]
            yield f"{answer.replica} at {answer.at:.1f} s says {answer.said} as {answer.label!r}, which is {wanted}"


def _never_back(report: Report) -> Iterator[str]:
    """But from a version that a newer trainer left behind."""
    alive = {version.label for version in _live(report.source)}
    before: dict[str, VersionId] = {}
    for answer in report.answers:
        version = parse_label(answer.label or "")
        if version is None:
            continue
        last = before.get(answer.replica)
        if last is not None and version < last and last.label in alive:
            yield f"{answer.replica} at {answer.at:.1f} s went back from {last} to {version}"
        before[answer.replica] = version


def _nothing_lost(report: Report) -> Iterator[str]:
    models = {version.label: version.model for version in report.source.versions}
    for told in report.publishes:
        if told.event == "published" and models.get(told.label) != told.model:
            yield f"{told.label} was published as {told.model}, and is {models.get(told.label, 'not there')}"


def _content(report: Report) -> Iterator[str]:
    """One content for each model, and each model its own."""
    contents: dict[str, set[str]] = defaultdict(set)
    for version in report.source.versions:
        contents[version.model].add(version.content)
    for model, found in contents.items():
        if len(found) > 1:
            yield f"versions of {model} have {len(found)} different contents"
    if len(set().union(*contents.values())) < len(contents):
        yield "two models have the same content"


def _gapless(report: Report) -> Iterator[str]:
    numbers: dict[int, list[VersionId]] = defaultdict(list)
    created = {parse_label(version.label): version.at for version in report.source.versions}
    for version in _ids(report.source):
        numbers[version.epoch].append(version)
    claims = {epoch.number: epoch for epoch in report.source.epochs}
    for number, versions in numbers.items():
        if number not in claims:
            yield f"epoch {number} was never claimed"
            continue
        first = claims[number].next_number
        if [version.number for version in versions] != list(range(first, first + len(versions))):
            yield f"epoch {number} has {', '.join(map(str, versions))}, from {first} on"
        if sorted(versions, key=lambda version: created[version]) != versions:
            yield f"epoch {number} was not committed in order"


def _epochs(report: Report) -> Iterator[str]:
    committed = set(_ids(report.source))
    for epoch in report.source.epochs:
        origin = parse_label(epoch.resumed_from)
        if origin is None and epoch.number > 1:
            yield f"epoch {epoch.number} began from nothing"
        if origin is not None and (origin not in committed or origin.epoch >= epoch.number):
            yield f"epoch {epoch.number} went on from {origin}, which it cannot"
        if origin is not None and epoch.next_number != origin.number + 1:
            yield f"epoch {epoch.number} went on from {origin} with number {epoch.next_number}"


def _fenced(report: Report) -> Iterator[str]:
    """Or its ranks have lost each other meanwhile: then it ends too, and publishes no more."""
    ends = ("fenced", "lost a rank")
    yield from (f"a trainer that was replaced: {how}" for how in report.replaced if how not in ends)


def _mirror(report: Report) -> Iterator[str]:
    records = {version.label: version for version in report.source.versions}
    for label in report.mirror.seen:
        if label not in records:
            yield f"the mirror had {label}, which the source never committed"
    for version in report.mirror.versions:
        original = records.get(version.label)
        if original is not None and original.record != version.record:
            yield f"{version.label} is another record at the mirror"
    if report.mirror.newest != report.source.newest:
        yield f"the mirror is at {report.mirror.newest or 'nothing'}, its source at {report.source.newest}"


def _clean(report: Report) -> Iterator[str]:
    yield from (f"source: {finding}" for finding in report.source.findings)
    yield from (f"mirror: {finding}" for finding in report.mirror.findings)


def _receipts(report: Report) -> Iterator[str]:
    committed = {version.label for version in report.source.versions}
    for attempt in report.attempts:
        if attempt.version not in committed:
            yield f"{attempt.watcher} at {attempt.at:.1f} s tried {attempt.version}, which was never committed"


def _ends_well(report: Report) -> Iterator[str]:
    newest = {"source": report.source.newest, "mirror": report.mirror.newest}
    models = {version.label: version.model for version in report.source.versions}
    if {end.replica for end in report.ends} != set(report.replicas):
        yield "not every engine was looked at in the end"
    for end in report.ends:
        wanted = newest[end.channel]
        if end.paused:
            yield f"{end.replica} was left paused"
        elif end.label != wanted:
            yield f"{end.replica} is on {end.label or 'its base weights'}, its channel at {wanted}"
        elif end.said != models.get(wanted):
            yield f"{end.replica} reports {end.label} and says {end.said or 'nothing'}, not {models.get(wanted)}"


def _alive(report: Report) -> Iterator[str]:
    yield from (f"{name} ended, and nobody had killed it" for name in report.ended)


def _happened(report: Report) -> Iterator[str]:
    """A run in which nothing was asked, or nothing happened, proves nothing."""
    heard = {answer.replica for answer in report.answers if answer.label}
    yield from (f"{name} never answered with a version" for name in report.replicas if name not in heard)
    if len(report.happened) != len(report.schedule):
        yield f"{len(report.happened)} of {len(report.schedule)} faults happened"


LAWS: dict[str, Law] = {
    "every answer is wholly of the version that it names": _whole,
    "no engine goes back": _never_back,
    "what a trainer was told is published is there": _nothing_lost,
    "a label matches its content": _content,
    "an epoch has no gaps, and is in order": _gapless,
    "an epoch goes on from a committed version": _epochs,
    "a trainer that was replaced is fenced": _fenced,
    "the mirror has what its source committed, and is at its newest": _mirror,
    "fsck and verify find nothing": _clean,
    "a receipt names a committed version": _receipts,
    "every engine ends on the newest version, not paused": _ends_well,
    "no process ended by itself": _alive,
    "everybody was asked, and every fault happened": _happened,
}


def _ids(holding: Holding) -> list[VersionId]:
    return sorted(found for version in holding.versions if (found := parse_label(version.label)) is not None)


def _live(holding: Holding) -> list[VersionId]:
    claims = {
        epoch.number: Claim(
            number=epoch.number, nonce="", run_id="", host="", created=0.0, next_number=epoch.next_number,
            resumed_from=parse_label(epoch.resumed_from),
        )
        for epoch in holding.epochs
    }  # fmt: skip
    return live(_ids(holding), claims)
