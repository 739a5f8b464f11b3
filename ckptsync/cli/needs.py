"""What a command needs beyond the core, told in one line."""

from __future__ import annotations

import importlib.util

from ..errors import InvalidInput


def needs(module: str, extra: str) -> None:
    """InvalidInput, with the remedy, if `module` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise InvalidInput(f"this command needs {module}: pip install 'ckptsync[{extra}]'")
