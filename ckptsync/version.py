"""The identity of a version, and how it is written in names and on the command line."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import InvalidName

# Full match only: "v00000007.tmp", "v7-copy" or ".nfs000" must never pass for a version.
_STEM = re.compile(r"e(\d{4,9})-v(\d{8,18})", re.ASCII)
_LABEL = re.compile(r"(?:e(\d{1,9})-)?v?(\d{1,18})", re.ASCII)


class VersionId(NamedTuple):
    """`(epoch, number)`. Compared as numbers, in this order; never as text, by mtime or by clock."""

    epoch: int
    number: int

    @property
    def stem(self) -> str:
        """The name on storage, e.g. `e0001-v00000042`."""
        return f"e{self.epoch:04d}-v{self.number:08d}"

    @property
    def label(self) -> str:
        """The name that people and engines see, e.g. `e1-v42`."""
        return f"e{self.epoch}-v{self.number}"

    def __str__(self) -> str:
        return self.label


def parse_stem(stem: str) -> VersionId | None:
    """The identity of `e0001-v00000042`, or None for anything else (which is then ignored)."""
    match = _STEM.fullmatch(stem)
    found = VersionId(int(match[1]), int(match[2])) if match else None
    return found if found and found.stem == stem else None


def parse_label(label: str) -> VersionId | None:
    """The identity of `e1-v42`, as engines and receipts carry it, or None for anything else."""
    match = _LABEL.fullmatch(label)
    found = VersionId(int(match[1]), int(match[2])) if match and match[1] else None
    return found if found and found.label == label else None


class VersionQuery(NamedTuple):
    """What a person asked for: an exact identity, a number in whatever epoch is live, or `latest` (both None)."""

    epoch: int | None
    number: int | None


def parse_query(text: str | int) -> VersionQuery:
    """`latest`, `42`, `v42`, `e2-v42` or a stem; a number may be an int. Raises InvalidName for anything else."""
    if text == "latest":
        return VersionQuery(None, None)
    match = _LABEL.fullmatch(str(text))
    if not match:
        raise InvalidName(f"{text!r} is not a version: use latest, 42 or e2-v42")
    return VersionQuery(int(match[1]) if match[1] else None, int(match[2]))


def label_version(label: str) -> VersionId | None:
    """The identity of exactly `e1-v42`, or None for anything else."""
    match = _LABEL.fullmatch(label)
    found = VersionId(int(match[1]), int(match[2])) if match and match[1] else None
    return found if found and found.label == label else None
