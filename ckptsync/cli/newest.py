"""What it does to readers that follow `latest` when a new version goes on from an older one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..channel import Channel
from ..version import VersionId
from ..wording import counted

RUNS = 6
FENCED = "note: a trainer that still runs is fenced by it: start it again, and it goes on from here"


class Line(NamedTuple):
    """Which version was the newest, and which were left behind, at one look."""

    newest: VersionId | None
    dead: frozenset[VersionId]

    @classmethod
    def of(cls, channel: Channel) -> Line:
        """As it is now."""
        return cls(channel.poll(), frozenset(channel.committed()) - frozenset(channel.versions()))

    def left_since(self, channel: Channel) -> list[VersionId]:
        """Versions that were left behind since, ascending; also such as a trainer committed in the meantime."""
        return sorted(set(channel.committed()) - set(channel.versions()) - self.dead)


def span(versions: list[VersionId]) -> str:
    """`6 newer versions (e1-v4 to e1-v9)`."""
    return f"{counted(len(versions), 'newer version')} ({_from_to(versions)})"


def ranges(versions: Iterable[VersionId]) -> str:
    """`e1-v1 to e1-v120, e2-v121`: each run of numbers of one epoch; of many runs the first few, and where they end."""
    runs: list[list[VersionId]] = []
    for version in sorted(versions):
        if runs and runs[-1][-1] == (version.epoch, version.number - 1):
            runs[-1].append(version)
        else:
            runs.append([version])
    named = [_from_to(run) for run in runs]
    if len(named) > RUNS:
        named[RUNS - 1 :] = [f"... {runs[-1][-1]}"]
    return ", ".join(named)


def _from_to(versions: list[VersionId]) -> str:
    return f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else f"{versions[0]}"


def moved(before: VersionId | None, source: VersionId, left: list[VersionId]) -> str:
    """Where readers that follow `latest` go, now that a version made of `source` is the newest."""
    if not left:
        return "it is the newest version: readers that follow latest go to it, with the same weights"
    came = f"from {before} " if before is not None and before != source else ""
    return (
        f"it is the newest version: readers that follow latest go {came}to the weights of {source}; "
        f"{span(left)} {'is' if len(left) == 1 else 'are'} left behind"
    )
