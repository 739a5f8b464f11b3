"""From a model's names to an engine's: ordered rules with one `*` each, checked where they are made.

    remap={"model.visual.*": None, "model.*": "language_model.model.*", "lm_head.weight": "language_model.head.weight"}

The first rule that matches decides; a name that none matches stays as it is. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .arguments import check
from .errors import DuplicateName, InvalidInput
from .manifest import MAIN_TRACK, check_basename

Remap = Mapping[str, str | None] | Sequence[tuple[str, str | None]]


@dataclass(frozen=True, slots=True)
class Rule:
    """`layers.*` -> `model.layers.*`; None drops what matches. What `*` stands for is carried over."""

    old: str
    new: str | None

    def matches(self, name: str) -> bool:
        head, star, tail = self.old.partition("*")
        if not star:
            return name == head
        return len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail)

    def apply(self, name: str) -> str | None:
        head, star, tail = self.old.partition("*")
        if self.new is None or not star:
            return self.new
        return self.new.replace("*", name[len(head) : len(name) - len(tail)])


def rules_of(remove: Iterable[str], remap: Remap) -> tuple[Rule, ...]:
    """Removals first, then the rules in their order. InvalidInput, naming the rule, for one that cannot be meant."""
    if isinstance(remove, str):
        raise InvalidInput(f"remove={remove!r}: must be a list of names, each with at most one '*'")
    names = "must be a dict of names, such as {'model.*': 'language_model.*'}"
    check("remap", remap, not isinstance(remap, str), names)
    pairs = remap.items() if isinstance(remap, Mapping) else remap
    rules = [Rule(name, None) for name in remove] + [Rule(old, new) for old, new in pairs]
    for rule in rules:
        _check(rule)
    twice = [old for old, group in itertools.groupby(sorted(rule.old for rule in rules)) if len(list(group)) > 1]
    if twice:
        raise InvalidInput(f"remap and remove name {twice[0]!r} more than once: only the first would count")
    return tuple(rules)


def _check(rule: Rule) -> None:
    for text in (rule.old, rule.new):
        if text is not None and (not isinstance(text, str) or not text or text.count("*") > 1):
            raise InvalidInput(
                f"remap {rule.old!r} -> {rule.new!r}: a name with at most one '*', or None for the new one"
            )
    if rule.new is not None and rule.old.count("*") != rule.new.count("*"):
        raise InvalidInput(f"remap {rule.old!r} -> {rule.new!r}: both sides need the same number of '*'")


def check_tracks(prefixes: Mapping[str, str]) -> None:
    """InvalidInput unless these are track names with a prefix each, all different."""
    for track, prefix in prefixes.items():
        check_basename(track, "track")
        if not isinstance(prefix, str):
            raise InvalidInput(f"track_prefix={{{track!r}: {prefix!r}}}: the prefix must be a string")
    if len(set(prefixes.values())) < len(prefixes):
        raise InvalidInput("track_prefix: two tracks have the same prefix")


class Place(NamedTuple):
    """Where a tensor goes in the version."""

    track: str
    name: str


class Naming:
    """The names of one version while its tensors are walked: what went where, what was dropped, what collides."""

    def __init__(self, rules: Sequence[Rule], prefix: str = "", track_prefix: Mapping[str, str] = {}) -> None:
        self._rules, self._prefix, self._tracks = rules, prefix, track_prefix
        self._used: set[Rule] = set()
        self._owners: dict[Place, str] = {}
        self.dropped: dict[str, None] = {}
        """Names, before any rule, of tensors that a rule took out."""

    def __call__(self, name: str, track: str = MAIN_TRACK) -> Place | None:
        """The place of `name`, or None if it is dropped. DuplicateName, naming both, if the place is taken."""
        rule = next((rule for rule in self._rules if rule.matches(name)), None)
        if rule is not None:
            self._used.add(rule)
        new = name if rule is None else rule.apply(name)
        if new is None:
            self.dropped[name] = None
            return None
        place = self._place(track, self._prefix + new)
        if (owner := self._owners.setdefault(place, name)) != name:
            raise DuplicateName(f"{owner!r} and {name!r} both become {place.name!r}: change the remap rules")
        return place

    @property
    def splits(self) -> bool:
        """Whether one model's tensors go into several tracks."""
        return bool(self._tracks)

    def check_used(self) -> None:
        """InvalidInput if a rule matched nothing: it is mistyped, or hidden behind an earlier one."""
        idle = [rule.old for rule in self._rules if rule not in self._used]
        if idle:
            raise InvalidInput(f"no tensor is named like {', '.join(map(repr, idle[:3]))}: correct remap or remove")

    def _place(self, track: str, name: str) -> Place:
        if not self._tracks:
            return Place(track, name)
        fits = [(prefix, track) for track, prefix in self._tracks.items() if name.startswith(prefix)]
        if not fits:
            known = ", ".join(map(repr, self._tracks.values()))
            raise InvalidInput(f"tensor {name!r} belongs to no track: track_prefix has {known}")
        prefix, found = max(fits, key=lambda fit: len(fit[0]))
        return Place(found, name[len(prefix) :])
