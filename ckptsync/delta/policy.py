"""When a publisher writes changes, and when a whole version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from ..arguments import check, check_positive, check_whole
from ..errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPolicy:
    """`Publisher(delta=DeltaPolicy())`: versions are changes against the one before, with a full one now and then.

    Costs host memory on each rank that writes: what it writes, once for the version before and once for each `skip`.
    """

    anchor_every: int = 256
    """At least every so many versions one is full. It has the changes besides, for readers that have the version
    before."""

    max_chain: float = 1.0
    """A full version comes earlier once the changes since the last one, without skips, add up to so many full ones.
    Full versions then cost no more than the changes do, and a reader that starts with nothing fetches two at most."""

    skip: tuple[int, ...] = (32,)
    """Every so many versions after the last full one, changes against the version so many before as well: one file
    for a reader that is far behind, several times smaller than all the steps between. A full version that is due by
    `max_chain` waits for the longest of these, unless the first is still to come."""

    max_ratio: float = 0.6
    """Changes larger than this fraction of a full version are not worth it: a full one is published."""

    effort: Literal["fast", "best"] = "best"
    """`best` is about a third smaller at 1 % of changes, `fast` encodes and decodes about three times as fast."""

    on_gpu: bool = False
    """Compare tensors that are on a GPU there, with a copy of the version before: only what changed comes to the host.
    Costs GPU memory, as much as a rank has of what is written. For publishes in the foreground, by a process or by many
    ranks, without a `transform`; elsewhere it changes nothing."""

    def __post_init__(self) -> None:
        check_whole("anchor_every", self.anchor_every, 1)
        check_positive("max_chain", self.max_chain)
        self._check_skip()
        ratio: Any = self.max_ratio
        fits = isinstance(ratio, Real) and 0 < float(ratio) <= 1
        check("max_ratio", ratio, fits, "must be a number above 0 and at most 1")
        if not isinstance(self.on_gpu, bool):
            raise InvalidInput(f"on_gpu={self.on_gpu!r}: use True or False")
        if self.effort not in ("fast", "best"):
            raise InvalidInput(f"effort={self.effort!r}: use 'fast' or 'best'")

    def _check_skip(self) -> None:
        given: Any = self.skip
        example = given if isinstance(given, int) and given >= 2 else 32
        fits = isinstance(given, Sequence) and not isinstance(given, str)
        check("skip", given, fits, f"must be a tuple, such as ({example},), or () for none")
        whole = all(isinstance(each, int) and each >= 2 for each in given)  # True is not: it is 1
        check("skip", given, whole and len(set(given)) == len(given), "must be different whole numbers of at least 2")

    def is_due(self, position: int, chain: float) -> bool:
        """Whether the version that is the `position`-th since a full one is to be full: `chain` is the changes between
        the two, in full versions."""
        longest = max(self.skip, default=1)
        return position >= self.anchor_every or (
            chain >= self.max_chain and (position <= longest or position % longest == 0)
        )
