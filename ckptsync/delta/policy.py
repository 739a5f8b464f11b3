"""When a publisher writes changes, and when a whole version."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

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
        check("skip", self.skip, isinstance(self.skip, Iterable), f"must be a tuple, such as ({self.skip!r},)")
        if any(isinstance(each, bool) or each < 2 for each in self.skip) or len(set(self.skip)) != len(self.skip):
            raise InvalidInput(f"skip={self.skip!r}: must be different numbers of at least 2")
        if not 0 < self.max_ratio <= 1:
            raise InvalidInput(f"max_ratio={self.max_ratio!r}: must be above 0 and at most 1")
        if not isinstance(self.on_gpu, bool):
            raise InvalidInput(f"on_gpu={self.on_gpu!r}: use True or False")
        if self.effort not in ("fast", "best"):
            raise InvalidInput(f"effort={self.effort!r}: use 'fast' or 'best'")

    def is_due(self, position: int, chain: float) -> bool:
        """Whether the version that is the `position`-th since a full one is to be full: `chain` is the changes between
        the two, in full versions."""
        longest = max(self.skip, default=1)
        return position >= self.anchor_every or (
            chain >= self.max_chain and (position <= longest or position % longest == 0)
        )
