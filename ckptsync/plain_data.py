"""Plain data as JSON and back, with tuples and infinities; what only a pickle could store is refused by name."""

from __future__ import annotations

import math
from typing import Any

from .errors import InvalidInput


def to_json(name: str, value: Any) -> Any:
    """Plain data as JSON: numbers, strings, None, lists, dicts with string keys; tuples stay tuples.

    InvalidInput, naming it, for anything else: it would take a pickle, and those are not read back here.
    """
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"!float": repr(value)}
    if isinstance(value, tuple):
        return {"!tuple": [to_json(name, item) for item in value]}
    if isinstance(value, list):
        return [to_json(name, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("!") for key in value):
        return {key: to_json(f"{name}.{key}", item) for key, item in value.items()}
    raise InvalidInput(
        f"trainer_state {name!r} is {type(value).__name__}, which only a pickle could store: "
        "make it a tensor, or numbers, strings, lists, tuples and dicts"
    )


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if set(value) == {"!tuple"}:
            return tuple(from_json(item) for item in value["!tuple"])
        if set(value) == {"!float"}:
            return float(value["!float"])
        return {key: from_json(item) for key, item in value.items()}
    return value
