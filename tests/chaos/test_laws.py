"""The judge is judged: a good run breaks no law, and each doctored one breaks the law that it is there for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from . import record, timeline
from .laws import LAWS, judge
from .record import Answer, Attempt, End, Epoch, Fault, Holding, Publish, Report, Version
from .table import table

NEAR, FAR = "embedded-1", "embedded-far"


def version(label: str, at: float, model: str) -> Version:
    return Version(label, at, model, "full", f"content of {model}", f"record of {label}")


@pytest.fixture
def report() -> Report:
    """An engine on the source, one on a mirror that keeps two; a trainer that was replaced, and left e1-v3 behind."""
    versions = [
        version("e1-v1", -2, "one"),
        version("e1-v2", 1, "two"),
        version("e1-v3", 5, "one"),
        version("e2-v3", 6, "two"),
        version("e2-v4", 8, "one"),
    ]
    epochs = [Epoch(1, 1), Epoch(2, 3, "e1-v2")]
    return Report(
        seed=1, seconds=10, engine="module", links="none", replicas=[NEAR, FAR], base="one",
        schedule=[Fault(5, 1, "replace", "trainer")],
        happened=[Fault(5.01, 1.2, "replace", "trainer")],
        answers=[
            Answer(0, NEAR, "", "one"), Answer(1, NEAR, None), Answer(2, NEAR, "e1-v2", "two"),
            Answer(2, FAR, "e1-v1", "one"), Answer(5.5, NEAR, "e1-v3", "one"), Answer(5.9, NEAR, "e1-v2", "two"),
            Answer(7, NEAR, "e2-v3", "two"), Answer(9, NEAR, "e2-v4", "one"), Answer(9, FAR, "e2-v4", "one"),
        ],
        publishes=[
            Publish(-2, "published", 1, "e1-v1", "one"), Publish(1, "published", 1, "e1-v2", "two"),
            Publish(6, "fenced"), Publish(6, "published", 2, "e2-v3", "two"), Publish(8, "refused", 2, "", "one"),
        ],
        attempts=[Attempt(8.5, "one", NEAR, "e2-v4", "serving", 0.1, 0.2)],
        source=Holding("e2-v4", versions, epochs, []),
        mirror=Holding("e2-v4", versions[-2:], epochs, [], ["e1-v1", "e2-v3", "e2-v4"]),
        ends=[End(NEAR, "source", "e2-v4", False, "one"), End(FAR, "mirror", "e2-v4", False, "one")],
        replaced=["fenced"],
    )  # fmt: skip


def broken(report: Report) -> list[str]:
    return [law for law, found in judge(report).items() if found]


def test_a_good_run_breaks_no_law(report: Report) -> None:
    assert broken(report) == []


def without(versions: list[Version], label: str) -> list[Version]:
    return [version for version in versions if version.label != label]


def swap(items: list, index: int, **changes: object) -> None:  # type: ignore[type-arg]
    items[index] = msgspec.structs.replace(items[index], **changes)


def to(holding: Holding, **changes: object) -> Holding:
    return msgspec.structs.replace(holding, **changes)


def lies(report: Report) -> None:
    """A watcher that sets the label and does not load."""
    swap(report.answers, 7, said="two")


def torn(report: Report) -> None:
    swap(report.answers, 7, said="[4, 5, 6]")


def unknown(report: Report) -> None:
    swap(report.answers, 7, label="e2-v5")


def base_is_not_the_base(report: Report) -> None:
    swap(report.answers, 0, said="two")


def back(report: Report) -> None:
    """To a version that is live still, from one that is."""
    report.answers.append(Answer(9.5, NEAR, "e2-v3", "two"))


def lost(report: Report) -> None:
    report.publishes.append(Publish(9, "published", 2, "e2-v5", "one"))


def mislabelled(report: Report) -> None:
    swap(report.source.versions, 4, content="content of two")


def gap(report: Report) -> None:
    left = [version for version in report.source.versions if version.label != "e1-v1"]
    report.source = to(report.source, versions=left)
    report.publishes = [told for told in report.publishes if told.label != "e1-v1"]
    report.answers = [answer for answer in report.answers if answer.label != "e1-v1"]
    report.mirror = to(report.mirror, seen=["e2-v3", "e2-v4"])


def out_of_order(report: Report) -> None:
    swap(report.source.versions, 4, at=5.5)


def from_nowhere(report: Report) -> None:
    report.source = to(report.source, epochs=[Epoch(1, 1), Epoch(2, 3)])


def from_what_is_not_there(report: Report) -> None:
    report.source = to(report.source, epochs=[Epoch(1, 1), Epoch(2, 3, "e1-v9")])


def goes_on(report: Report) -> None:
    report.replaced = ["goes on"]


def invented(report: Report) -> None:
    report.mirror.seen.append("e2-v7")


def altered(report: Report) -> None:
    swap(report.mirror.versions, 1, record="another")


def behind(report: Report) -> None:
    report.mirror = to(report.mirror, newest="e2-v3")
    report.ends[1] = End(FAR, "mirror", "e2-v3", False, "two")


def damaged(report: Report) -> None:
    report.source.findings.append("e2-v4: model.safetensors is not there")


def unheard_of(report: Report) -> None:
    swap(report.attempts, 0, version="e2-v5")


def paused(report: Report) -> None:
    swap(report.ends, 0, paused=True)


def stale(report: Report) -> None:
    report.ends[0] = End(NEAR, "source", "e2-v3", False, "two")


def dumb(report: Report) -> None:
    swap(report.ends, 0, said="")


def forgotten(report: Report) -> None:
    report.ends.pop()


def dead(report: Report) -> None:
    report.ended = ["mirror"]


def silent(report: Report) -> None:
    report.answers = [answer for answer in report.answers if answer.replica != FAR]


def idle(report: Report) -> None:
    report.happened = []


PLANTED: list[tuple[Callable[[Report], None], str]] = [
    (lies, "every answer is wholly of the version that it names"),
    (torn, "every answer is wholly of the version that it names"),
    (unknown, "every answer is wholly of the version that it names"),
    (base_is_not_the_base, "every answer is wholly of the version that it names"),
    (back, "no engine goes back"),
    (lost, "what a trainer was told is published is there"),
    (mislabelled, "a label matches its content"),
    (gap, "an epoch has no gaps, and is in order"),
    (out_of_order, "an epoch has no gaps, and is in order"),
    (from_nowhere, "an epoch goes on from a committed version"),
    (from_what_is_not_there, "an epoch goes on from a committed version"),
    (goes_on, "a trainer that was replaced is fenced"),
    (invented, "the mirror has what its source committed, and is at its newest"),
    (altered, "the mirror has what its source committed, and is at its newest"),
    (behind, "the mirror has what its source committed, and is at its newest"),
    (damaged, "fsck and verify find nothing"),
    (unheard_of, "a receipt names a committed version"),
    (paused, "every engine ends on the newest version, not paused"),
    (stale, "every engine ends on the newest version, not paused"),
    (dumb, "every engine ends on the newest version, not paused"),
    (forgotten, "every engine ends on the newest version, not paused"),
    (dead, "no process ended by itself"),
    (silent, "everybody was asked, and every fault happened"),
    (idle, "everybody was asked, and every fault happened"),
]


@pytest.mark.parametrize(("plant", "law"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_violation_breaks_its_law(report: Report, plant: Callable[[Report], None], law: str) -> None:
    plant(report)
    assert law in broken(report)


def test_every_law_has_a_violation_that_breaks_it() -> None:
    assert {law for _, law in PLANTED} == set(LAWS)


def test_a_report_is_written_read_drawn_and_put_into_words(report: Report, tmp_path: Path) -> None:
    lies(report)
    record.save(report, str(tmp_path / "report.json"))
    assert record.load(str(tmp_path / "report.json")) == report
    timeline.draw(report, str(tmp_path / "timeline.png"))
    assert (tmp_path / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    assert "BROKEN  every answer is wholly of the version that it names" in table(report, judge(report))
