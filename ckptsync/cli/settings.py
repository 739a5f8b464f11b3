"""Which options of which command may be set outside of the call, and what they are set to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import typer

from ..config import PUBLISHER, PUBLISHER_ELSEWHERE, PUBLISHER_VARIABLES, PublisherConfig
from ..errors import InvalidInput
from ..settings import Settings, variable

ONE_OFF = {"from", "step", "meta", "why", "since", "png", "output", "hosts"}
"""Options that belong to one call. So do those that are hidden, flags, which a file could turn on and no call turn off
again, and arguments other than ROOT."""

WITHOUT = {"demo", "config"}
"""Commands that nothing is set for."""

SECRET = {"token", "api_key", "admin_key", "sign_key"}


class Option(NamedTuple):
    """One option: its key in a file, its variable, and click's own parameter (of a class that typer may vendor)."""

    key: str
    variable: str
    param: Any


class Row(NamedTuple):
    """What one option of one command is, and where from: a variable, a file, or `default`."""

    section: str
    key: str
    value: Any
    origin: str


def options(command: Any) -> list[Option]:
    """Those of a click command that may be set."""
    found = []
    for param in command.params:
        key = _key(param)
        own = getattr(param, "is_flag", False) or getattr(param, "hidden", False)
        if not own and key not in ONE_OFF and (param.param_type_name == "option" or key == "root"):
            found.append(Option(key, param.envvar or variable(key), param))
    return found


def defaults(context: Any, name: str, command: Any, settings: Settings) -> dict[str, Any]:
    """click's `default_map` for one command. InvalidInput, naming where it is from, for a value that is none."""
    known = options(command)
    found = settings.of(name, {option.key: option.variable for option in known})
    chosen = {}
    for option in known:
        if option.key in found:
            value, origin = found[option.key]
            if option.param.multiple and isinstance(value, str):
                value = value.split()
            try:
                option.param.process_value(context, value)
            except typer.BadParameter as error:
                raise InvalidInput(f"{option.key} = {value!r} of {origin}: {error.message}") from error
            chosen[option.param.name] = value
    return chosen


def check(settings: Settings, commands: Mapping[str, Any]) -> None:
    """InvalidInput for what is set and belongs to no command. Needs all commands, so only asked where something is."""
    known = {name: [option.key for option in options(command)] for name, command in commands.items()}
    shared = {key for keys in known.values() for key in keys}
    elsewhere = {**{name: _one_off(command) for name, command in commands.items()}, PUBLISHER: PUBLISHER_ELSEWHERE}
    settings.check_file({**known, PUBLISHER: list(PUBLISHER_VARIABLES)}, shared, elsewhere)
    variables = {option.variable for command in commands.values() for option in options(command)}
    settings.check_environment({*variables, *PUBLISHER_VARIABLES.values()})


def set_for(settings: Settings, name: str, command: Any, *, with_defaults: bool = False) -> Iterator[Row]:
    """What is in force for one command, but for what its call will say."""
    known = options(command)
    found = settings.of(name, {option.key: option.variable for option in known})
    for option in known:
        if option.key in found:
            value, origin = found[option.key]
            yield Row(name, option.key, _shown(option.key, value), origin)
        elif with_defaults:
            yield Row(name, option.key, option.param.default, "default")


def set_for_publishers(settings: Settings, *, with_defaults: bool = False) -> Iterator[Row]:
    """What `PublisherConfig.load` would find."""
    found = settings.of(PUBLISHER, PUBLISHER_VARIABLES, shared=False)
    for key in PUBLISHER_VARIABLES:
        if key in found:
            yield Row(PUBLISHER, key, _shown(key, found[key].value), found[key].origin)
        elif with_defaults:
            yield Row(PUBLISHER, key, getattr(PublisherConfig(), key), "default")


def _one_off(command: Any) -> dict[str, str]:
    """Options of a click command that no file can set, by key, and how they are given."""
    own = {option.param.name for option in options(command)}
    return {
        _key(param): f"belongs to the call: ckptsync {command.name} {max(param.opts, key=len)}"
        for param in command.params
        if param.param_type_name == "option" and param.name not in own and param.name != "help"
    }


def _shown(key: str, value: Any) -> Any:
    """Without secrets: neither keys nor the password in an URL."""
    if key in SECRET:
        return "(secret)"
    if isinstance(value, list):
        return [_shown(key, each) for each in value]
    return re.sub(r"(?<=://)[^/@\s]*(?=@)", "(secret)", value) if isinstance(value, str) else value


def _key(param: Any) -> str:
    """The option's long name as a file has it: `keep_last`."""
    names = [name for name in param.opts if name.startswith("--")]
    return (names[0] if names else str(param.name)).lstrip("-").replace("-", "_")
