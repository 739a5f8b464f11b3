"""Whose server is this? Asked when one does not answer as the adapter's engine would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ckptsync.errors import EngineRefused

_SIGNS = {
    "sglang": ("SGLang", "/model_info", "model_path"),
    "vllm": ("vLLM", "/version", "version"),
    "module": ("the embedded server", "/status", "boot_id"),
}
"""`--engine` -> its name, and a route that only it has, with a field of the answer. None needs a development mode."""


@contextmanager
def told_apart(own: str, url: str, get: Callable[[str], Any]) -> Iterator[None]:
    """A refusal by a server of another kind says whose it is. `get`: the JSON at a path, None where there is none."""
    try:
        yield
    except EngineRefused as error:
        found = next((kind for kind, (_, path, field) in _SIGNS.items() if _has(get(path), field)), "")
        if found == own:
            raise
        like = f" but like {_SIGNS[found][0]}: try --engine {found}" if found else ": check its url and --engine"
        raise EngineRefused(f"{url} does not look like {_SIGNS[own][0]}{like}. ({error})") from error


def _has(body: Any, field: str) -> bool:
    return isinstance(body, dict) and field in body
