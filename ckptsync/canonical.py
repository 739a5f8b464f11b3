"""JSON with one form for each value, so that a digest over it means something."""

from __future__ import annotations

import math
from typing import Any

import msgspec


def canonical(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no white space, no NaN or infinity (ValueError)."""
    _refuse_nan(value)
    return msgspec.json.encode(value, order="sorted")


def _refuse_nan(value: Any) -> None:
    # msgspec writes NaN as null, which would change the data silently.
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot be written as JSON: use a string or leave it out")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_nan(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_nan(item)
