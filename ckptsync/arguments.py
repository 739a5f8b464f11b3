"""Wrong arguments, refused by name where they come in. Imports no torch."""

from __future__ import annotations

from numbers import Real
from typing import Any

from .errors import InvalidInput


def check_whole(name: str, value: Any, least: int) -> None:
    """InvalidInput unless it is an int, and no bool, of at least that."""
    check(name, value, isinstance(value, int) and value >= least, f"must be a whole number of at least {least}")


def check_positive(name: str, value: Any) -> None:
    """InvalidInput unless it is a number, and no bool, above 0."""
    check(name, value, isinstance(value, Real) and float(value) > 0, "must be greater than 0, a number")


def check(name: str, value: Any, fits: bool, remedy: str) -> None:
    """InvalidInput unless it fits, and for a bool: those pass for numbers in Python, and are none. `remedy` says what
    does fit."""
    if isinstance(value, bool) or not fits:
        raise InvalidInput(f"{name}={value!r}: {remedy}")
