"""Lives that are written by hand, without hypothesis to draw what happens next."""

from __future__ import annotations

from typing import Any

from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.strategies import SearchStrategy


class First:
    """In the place of hypothesis: draws the first of a few."""

    def draw(self, few: SearchStrategy[Any]) -> Any:
        return few.elements[0]  # type: ignore[attr-defined]


def look_at_the_laws(life: RuleBasedStateMachine) -> None:
    for law in sorted(name for name in dir(life) if name.startswith("law_")):
        getattr(life, law)()
