"""For tests of what is built on ckptsync, and of the stores and engines that it is to run on; see `docs/testing.md`.

    memory      a store that a test can look into; `counting`: what is asked of one
    hooks       anything before and after each store operation; `stores`: weaknesses of real ones
    filesystem  one that refuses links, renames, chmod or fsync
    contract    what a store has to pass
    engines     engines that lie, half-apply, hang and die; faults around one of yours
    crashes     a script that is killed at each of its store operations; `power`: and the power with it
    explore     a few actors on one store, in every order
    lifecycle   random lives of a channel, against the laws; `strategies`: what goes through a channel

`contract`, `lifecycle` and `strategies` need the extra `testing`.
"""

import sys

from .counting import CountingStore, Counts
from .explore import Explored, Scenario, Violation, explore
from .memory import MemoryStore

if "pytest" in sys.modules:  # before they are imported: their failures show values, as those of a test file do
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.contract", f"{__name__}.lifecycle")

__all__ = ["CountingStore", "Counts", "Explored", "MemoryStore", "Scenario", "Violation", "explore"]
