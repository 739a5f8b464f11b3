"""Where to cut the magnitudes into classes: small weights change often and large ones hardly ever, so counting
gaps among one's own kind says more with fewer bits. The limits travel in the payload; only the encoder chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .kernels import kernels
from .reference import U32, Elements

CLASSES = 4
"""Bits for each place at 1 % of changes: 8.1 with one class, 6.3 with two, 5.9 with three, 5.7 with four, and 5.5 with
one for each exponent."""

SAMPLE = 16
"""One in so many elements is looked at to learn how common each magnitude is."""


def choose_limits(old: Elements, places: U32, classes: int = CLASSES) -> Elements:
    """Ascending magnitudes at which the next class begins: those that need the fewest bits for the places."""
    return limits_of(kernels().histogram(old, SAMPLE), kernels().histogram(old[places]), old.dtype, classes)


def limits_of(
    sampled: npt.NDArray[np.int64], hit: npt.NDArray[np.int64], dtype: np.dtype[Any], classes: int = CLASSES
) -> Elements:
    """The same from the histograms of one in SAMPLE old magnitudes, and of those that change."""
    there = np.maximum(sampled * SAMPLE, hit)
    bins = np.flatnonzero(there)
    cuts = kernels().cut(there[bins].astype(np.float64), hit[bins].astype(np.float64), classes)
    return (bins[cuts] << max(0, dtype.itemsize * 8 - 9)).astype(dtype)
