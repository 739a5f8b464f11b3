"""What a sync is given, looked at before an epoch is claimed: lists, of what can be sent by and sent to."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInput

_TRANSPORT = ("name", "pauses", "probe", "send")
_ENGINE = ("name", "status", "pause", "resume")


def check_transports(transports: Sequence[object]) -> None:
    """InvalidInput for what is no list of transports, for none, and for two of one name."""
    _check_each("transports", transports, _TRANSPORT, "a transport", "[Gloo(), Checkpoint()]")
    names = [getattr(each, "name") for each in transports]  # noqa: B009 - of each's own type
    if not names or len(set(names)) < len(names):
        raise InvalidInput(f"transports={names}: give at least one, and each once")


def check_engines(engines: Sequence[object]) -> None:
    """InvalidInput for what is no list of engines, and for two of one name."""
    _check_each("engines", engines, _ENGINE, "an engine", "[VllmEngine(url)]")
    names = [getattr(each, "name") for each in engines]  # noqa: B009 - of each's own type
    if len(set(names)) < len(names):
        raise InvalidInput(f"engines: two have one name ({', '.join(sorted(names))})")


def _check_each(what: str, given: Sequence[object], needs: Sequence[str], one: str, example: str) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidInput(f"{what}={given!r}: must be a list, such as {what}={example}")
    for each in given:
        if isinstance(each, type):
            raise InvalidInput(f"{what}: {each.__name__} is a class: give an object of it, such as {example}")
        if not all(hasattr(each, name) for name in needs):
            raise InvalidInput(f"{what}: {each!r} is not {one}: give objects, such as {example}")
