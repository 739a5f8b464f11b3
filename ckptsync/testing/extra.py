"""What the extra `testing` brings, and what is said where it is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import InvalidInput


@contextmanager
def needed(module: str) -> Iterator[None]:
    """InvalidInput, naming the extra, if the import in the block fails for want of `module`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise InvalidInput(f"this part of ckptsync.testing needs {module}: pip install 'ckptsync[testing]'") from error
