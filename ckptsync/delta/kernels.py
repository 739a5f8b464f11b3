"""Which kernels run: the compiled ones where numba is installed, else numpy's."""

from __future__ import annotations

import functools
import importlib.util
from typing import Protocol

from .reference import F64, U8, U32, Elements


class Kernels(Protocol):
    """What `reference` and `compiled` both offer; described in `reference`."""

    def changed(self, old: Elements, new: Elements) -> tuple[U32, Elements]: ...

    def write_digits(self, gaps: U32) -> U8: ...

    def read_digits(self, digits: U8, count: int) -> U32 | None: ...

    def ranks_from_gaps(self, gaps: U32, limit: int) -> U32 | None: ...

    def write_values(self, differences: Elements) -> tuple[U8, U8, U8, Elements]: ...

    def add_values(self, target: Elements, places: U32, signs: U8, quads: U8, small: U8, large: Elements) -> bool: ...

    def class_ranks(self, old: Elements, places: U32, limits: Elements) -> tuple[U8, U32]: ...

    def class_places(self, old: Elements, ranks: U32, counts: Elements, limits: Elements) -> U32 | None: ...

    def histogram(self, values: Elements, step: int = 1) -> Elements: ...

    def cut(self, there: F64, hit: F64, classes: int) -> list[int]: ...

    def zigzag(self, old: Elements, new: Elements) -> Elements: ...

    def unzigzag(self, target: Elements, coded: Elements) -> None: ...


@functools.cache
def kernels() -> Kernels:
    """Imported at the first use: numba takes half a second."""
    if importlib.util.find_spec("numba") is None:
        from . import reference

        return reference
    from . import compiled

    return compiled
