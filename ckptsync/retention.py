"""What may go, and why each version that stays does. A pure decision: nothing in here touches a store.

Whatever the policy says, these stay: the newest complete version, what is leased or pinned, what a live reader
serves, the base model, what cannot be read, and everything that a version which stays is made from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .arguments import check_positive, check_whole
from .errors import InvalidInput
from .manifest import Kind, Manifest, Origin
from .version import VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which versions to keep: the `keep_last` newest, and of those before every `keep_every`-th, within limits.

    The limits never touch the newest ones. With a limit and without `keep_every`, all of history within it stays.
    """

    keep_last: int
    """So many of the newest complete versions stay. At least 2: the newest may turn out not to load."""

    keep_every: int | None = None
    """Versions whose number is a multiple of this stay."""

    max_bytes: int | None = None
    """History goes, the oldest first, while all that stays takes more bytes on storage than this."""

    max_age: float | None = None
    """History goes once it is older than so many seconds, by the store's clock."""

    keep_adapters: int = 2
    """The `keep_last` of adapter versions, which have a window of their own: the watchers' staleness + 1."""

    keep_branches: bool = True
    """The newest ones of every branch that a resume left behind stay too, in case the resume was the mistake."""

    grace: float = 300.0
    """Seconds between a version's end and that of its data, for a reader that took no lease."""

    def __post_init__(self) -> None:
        for name, least in (("keep_last", 2), ("keep_adapters", 2), ("keep_every", 1), ("max_bytes", 1)):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, least)
        if self.max_age is not None:
            check_positive("max_age", self.max_age)
        if not self.grace >= 0:
            raise InvalidInput(f"grace={self.grace!r}: must be 0 or more")

    @property
    def every(self) -> int:
        """Of history, each version whose number is a multiple of this is wanted; 0 for none."""
        limited = self.max_bytes is not None or self.max_age is not None
        return self.keep_every or int(limited)


class Candidate(NamedTuple):
    """A complete version as the decision sees it. `nbytes` on storage, `age` in seconds, at least."""

    id: VersionId
    kind: Kind
    needs: tuple[VersionId, ...]
    nbytes: int
    age: float


class Plan(NamedTuple):
    """`keep`: version -> why it stays. `go`: newest first, so that nothing ever lacks what it is made from."""

    keep: dict[VersionId, str]
    go: tuple[VersionId, ...]


def needs_of(manifest: Manifest) -> tuple[VersionId, ...]:
    """The versions whose data this one is made from. A full version that has changes besides needs none."""
    if isinstance(manifest.data_of, Origin):
        return (manifest.data_of.id,)
    if manifest.kind == "delta" and manifest.parent is not None:
        return (VersionId(manifest.parent.epoch, manifest.parent.number),)
    return ()


def decide(
    policy: Retention,
    versions: Iterable[Candidate],
    *,
    live: Collection[VersionId],
    held: Mapping[VersionId, str],
    unreadable: Mapping[VersionId, bool] | None = None,
) -> Plan:
    """`held`: what others asked to keep, and who. `unreadable`: versions without a readable manifest, and whether it
    may be of a newer release, which could need any version before it."""
    kept = _Kept({candidate.id: candidate for candidate in versions})
    kept.add_unreadable(unreadable or {})
    for version, who in held.items():
        kept.add(version, who)
    for version in kept.versions:
        if version.number == 0:
            kept.add(version, "the base model")
    for line in _lines(kept.versions, live, branches=policy.keep_branches):
        kept.add_newest(line, policy, live)
    kept.add_history(policy)
    return kept.plan()


def _lines(
    versions: Iterable[VersionId], live: Collection[VersionId], *, branches: bool
) -> Iterable[Sequence[VersionId]]:
    """The live line, and what each epoch left beside it; ascending."""
    lines: dict[int, list[VersionId]] = {}
    for version in sorted(versions):
        lines.setdefault(0 if version in live else version.epoch, []).append(version)
    return lines.values() if branches else [lines.get(0, [])]


@dataclass(slots=True)
class _Kept:
    versions: dict[VersionId, Candidate]
    reasons: dict[VersionId, str] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, version: VersionId, why: str) -> None:
        """With all that it is made from. The first reason is the one that counts."""
        missing = self._missing(version)
        self.nbytes += sum(each.nbytes for each in missing)
        self.reasons.update({each.id: why if each.id == version else f"needed by {version}" for each in missing})

    def add_unreadable(self, unreadable: Mapping[VersionId, bool]) -> None:
        self.reasons |= dict.fromkeys(unreadable, "its manifest cannot be read")
        newest = max((version for version, is_newer in unreadable.items() if is_newer), default=None)
        for older in [each for each in self.versions if newest is not None and each < newest]:
            self.add(older, f"perhaps needed by {newest}, which is of a newer release")

    def add_newest(self, line: Sequence[VersionId], policy: Retention, live: Collection[VersionId]) -> None:
        for of_adapters, count in ((False, policy.keep_last), (True, policy.keep_adapters)):
            mine = [each for each in line if (self.versions[each].kind == "adapter") == of_adapters]
            for at, version in enumerate(reversed(mine[-count:])):
                where = "" if version in live else " of a branch that was left behind"
                self.add(version, f"the newest{where}" if at == 0 else f"among the {count} newest{where}")

    def add_history(self, policy: Retention) -> None:
        for version in sorted(self.versions, reverse=True) if policy.every else ():
            if version in self.reasons or version.number % policy.every:
                continue
            if policy.max_age is not None and self.versions[version].age > policy.max_age:
                continue
            size = sum(each.nbytes for each in self._missing(version))
            if policy.max_bytes is not None and self.nbytes + size > policy.max_bytes:
                return
            self.add(
                version,
                f"its number is a multiple of {policy.every}" if policy.keep_every else "history within the limits",
            )

    def plan(self) -> Plan:
        go = (version for version in sorted(self.versions, reverse=True) if version not in self.reasons)
        return Plan(dict(sorted(self.reasons.items())), tuple(go))

    def _missing(self, version: VersionId) -> list[Candidate]:
        """It and its ancestors, as far as they are there and not kept yet."""
        found: dict[VersionId, Candidate] = {}
        open_ends = [version]
        while open_ends:
            candidate = self.versions.get(open_ends.pop())
            if candidate is not None and candidate.id not in self.reasons and candidate.id not in found:
                found[candidate.id] = candidate
                open_ends += candidate.needs
        return list(found.values())
