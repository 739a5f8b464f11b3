"""All that was seen in a run, as plain data. Times are seconds since the faults began, sizes bytes."""

from __future__ import annotations

import msgspec

FORMAT = 1


class Fault(msgspec.Struct, frozen=True):
    """One of the schedule: `kind` hits `actor` at a time, and is over after so long."""

    at: float
    seconds: float
    kind: str
    actor: str


class Answer(msgspec.Struct, frozen=True):
    """What a client got of an engine. `said` names the model that says so; what none says is there token by token."""

    at: float
    replica: str
    label: str | None
    """The version that the answer names; empty for the weights that it started on, None for no answer."""

    said: str = ""


class Publish(msgspec.Struct, frozen=True):
    """What a trainer was told: `event` is started, published, refused (by a store that was away), fenced or lost
    (a rank)."""

    at: float
    event: str
    epoch: int = 0
    label: str = ""
    model: str = ""
    why: str = ""


class Version(msgspec.Struct, frozen=True):
    """One that a channel holds at the end. `record` is the digest of its manifest's bytes."""

    label: str
    at: float
    model: str
    kind: str
    content: str
    record: str


class Epoch(msgspec.Struct, frozen=True):
    """A claim: where this attempt went on from, if anywhere, and the number of its first version."""

    number: int
    next_number: int
    resumed_from: str = ""


class Holding(msgspec.Struct, frozen=True):
    """A channel as it is at the end. `newest` is of the live versions; `findings` of fsck and verify; `seen` names
    every version that was ever there."""

    newest: str
    versions: list[Version]
    epochs: list[Epoch]
    findings: list[str]
    seen: list[str] = []


class Attempt(msgspec.Struct, frozen=True):
    """A watcher's receipt for one attempt to load a version. `engine`: of `replicas`, or a fleet as a whole."""

    at: float
    watcher: str
    engine: str
    version: str
    state: str
    stage_seconds: float
    pause_seconds: float
    error: str = ""


class End(msgspec.Struct, frozen=True):
    """How an engine was found at the end: what it reports, whether it is paused, and which model it sounds like."""

    replica: str
    channel: str
    label: str
    paused: bool
    said: str


class Report(msgspec.Struct, kw_only=True):
    """`report.json`: what was to happen, and what did."""

    format: int = FORMAT
    seed: int
    seconds: float
    engine: str
    links: str
    """How a link is made slow here: netem, tbf, or none where every part is on one host."""

    replicas: list[str]
    base: str
    """The model that every engine starts on."""

    schedule: list[Fault]
    took: dict[str, float] = {}
    """Phase of the run, in order -> seconds."""

    happened: list[Fault] = []
    answers: list[Answer] = []
    publishes: list[Publish] = []
    attempts: list[Attempt] = []
    source: Holding = Holding("", [], [], [])
    mirror: Holding = Holding("", [], [], [])
    ends: list[End] = []
    replaced: list[str] = []
    """How each trainer ended that another one took the place of while it was frozen."""

    ended: list[str] = []
    """Processes that ended though nobody killed them."""


def load(path: str) -> Report:
    """Raises msgspec.ValidationError for a file that is no report."""
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=Report)


def save(report: Report, path: str) -> None:
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(report))
