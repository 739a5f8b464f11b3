"""How the tensors of two models differ by name, dtype and shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from .manifest import TensorSpec
from .wording import plain, shortened

SHOWN = 3


class SchemaChange(msgspec.Struct, frozen=True, kw_only=True):
    """Empty, and false, if one engine can take both in turn."""

    removed: tuple[str, ...]
    """Names that only the older has."""

    added: tuple[str, ...]
    """Names that only the newer has."""

    reshaped: dict[str, tuple[str, str]]
    """Name -> dtype and shape in the older and in the newer, where these differ."""

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.reshaped)

    def lines(self) -> Iterator[str]:
        """What differs, with the first names of each kind."""
        if self.removed:
            yield f"{len(self.removed)} only in the older: {_some(map(_said, self.removed))}"
        if self.added:
            yield f"{len(self.added)} only in the newer: {_some(map(_said, self.added))}"
        if self.reshaped:
            each = [f"{_said(name)} {old}, now {new}" for name, (old, new) in self.reshaped.items()]
            yield f"{len(each)} of another dtype or shape: {_some(each)}"


def schema_change(old: Mapping[str, TensorSpec], new: Mapping[str, TensorSpec]) -> SchemaChange:
    """By name, in the order of the newer."""
    return SchemaChange(
        removed=tuple(name for name in old if name not in new),
        added=tuple(name for name in new if name not in old),
        reshaped={name: (_text(old[name]), _text(spec)) for name, spec in new.items()
                  if name in old and old[name] != spec},
    )  # fmt: skip


def _text(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _said(name: str) -> str:
    return shortened(plain(name))


def _some(things: Iterable[str]) -> str:
    shown = list(islice(things, SHOWN + 1))
    return ", ".join(shown[:SHOWN]) + (", ..." if len(shown) > SHOWN else "")
