"""Payloads of the blocks whose changes were grouped on the device: the host compresses, and says where everything goes.

Nothing here is done block by block: at a thousand blocks a few microseconds of Python for each are what an encode
takes. All sections of a run are compressed in one call, and everything is copied once, to where it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import layout, modes
from ..layout import ALIGN
from ..modes import PER_CLASS
from .flat import Counts
from .groups import Split
from .sections import Sections


class Payloads(NamedTuple):
    """Of a run of blocks: sections that are not put together yet."""

    blocks: Sequence[Split]
    numbers: Counts
    """Of each block how many sections it has; the first is the table of its classes."""

    data: Sequence[layout.Bytes]
    """[sections], as they are stored."""

    stored: Counts
    raw: Counts
    """[sections]: bytes, as stored and when inflated."""

    @property
    def indexes(self) -> Counts:
        return np.array([block.index for block in self.blocks], dtype=np.int64)

    def sizes(self) -> Counts:
        """Of each block the bytes of its payload."""
        return np.add.reduceat(_aligned(self.stored), _before(self.numbers)) + ALIGN * self.numbers

    def only(self, kept: npt.NDArray[np.bool_]) -> Payloads:
        """The blocks that are `kept`."""
        own = np.repeat(kept, self.numbers)
        return Payloads(
            list(compress(self.blocks, kept)), self.numbers[kept], list(compress(self.data, own)), self.stored[own],
            self.raw[own],
        )  # fmt: skip

    def write(self, out: npt.NDArray[np.uint8], starts: Counts) -> None:
        """Put each block's payload into `out`, from `starts` on. Those are multiples of eight, as `out`'s size is."""
        words, firsts = out.view("<u8"), _before(self.numbers)
        sections = np.arange(len(self.stored)) - np.repeat(firsts, self.numbers)
        begins = np.repeat(starts, self.numbers)
        words[begins // ALIGN + sections] = (self.stored | self.raw << 32).astype(np.uint64)
        before = _before(_aligned(self.stored))
        begins += np.repeat(ALIGN * self.numbers - before[firsts], self.numbers) + before
        words[((begins + self.stored) // ALIGN)[self.stored % ALIGN > 0]] = 0
        memory = out.data
        for data, at, size in zip(self.data, begins.tolist(), self.stored.tolist(), strict=True):
            if size:
                # Not by numpy, which lets go of the interpreter's lock for each: to get it back takes longer.
                memory[at : at + size] = data


def packed(blocks: Sequence[Split], counts: Counts, sections: Sections, threads: int) -> Payloads:
    """Blocks whose groups have so many changes and these sections; `threads` as `layout.packed_sections` takes them."""
    groups = np.array([len(block.limits) + 1 for block in blocks], dtype=np.int64)
    records = np.zeros(len(counts), dtype=modes.CLASS)
    records["limit"] = [limit for block in blocks for limit in (*block.limits, 0)]
    records["changed"], records["split"] = counts, sections.split
    tables, table_sizes = _tables(records, groups, threads)
    data, stored = layout.packed_sections(sections.data, sections.begins.ravel(), sections.sizes.ravel(), threads)
    firsts = _before(groups) * PER_CLASS
    return Payloads(
        blocks, 1 + PER_CLASS * groups, _interleaved(tables, data, firsts), np.insert(stored, firsts, table_sizes),
        np.insert(sections.sizes.ravel(), firsts, groups * modes.CLASS.itemsize),
    )  # fmt: skip


def _tables(records: npt.NDArray[Any], groups: Counts, threads: int) -> tuple[list[layout.Bytes], Counts]:
    size = modes.CLASS.itemsize
    return layout.packed_sections(records.view(np.uint8), _before(groups) * size, groups * size, threads)


def _interleaved(tables: Sequence[layout.Bytes], data: Sequence[layout.Bytes], firsts: Counts) -> list[layout.Bytes]:
    """Before the data of each block its table."""
    found: list[layout.Bytes] = []
    for table, first, last in zip(tables, firsts.tolist(), [*firsts[1:].tolist(), len(data)], strict=True):
        found.append(table)
        found += data[first:last]
    return found


def _aligned(sizes: Counts) -> Counts:
    return -(-sizes // ALIGN) * ALIGN


def _before(sizes: Counts) -> Counts:
    """Of each how much comes before it."""
    return sizes.cumsum() - sizes
