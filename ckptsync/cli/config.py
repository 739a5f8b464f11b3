"""`ckptsync config`: what is set outside of the call, and where."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table

from ..config import PUBLISHER
from ..errors import InvalidInput
from ..settings import FILE, Settings
from . import load_commands
from .output import AsJson, out, print_json, print_wide
from .settings import Row, set_for, set_for_publishers


def run(
    context: typer.Context,
    command: Annotated[
        str, typer.Argument(metavar="[COMMAND]", help="All options of this one, or of `publisher`, defaults too.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Print what CKPTSYNC_* variables and ckptsync.toml set, for which command. What the call says goes before both.

    Exit code 2 for a key that no command knows.
    """
    settings: Settings = context.obj
    commands = load_commands()
    if command and command not in {*commands, PUBLISHER}:
        raise InvalidInput(f"{command!r} is no command that can be set up: {', '.join([*commands, PUBLISHER])}")
    if command == PUBLISHER:
        rows = list(set_for_publishers(settings, with_defaults=True))
    elif command:
        rows = list(set_for(settings, command, commands[command], with_defaults=True))
    else:
        rows = [row for name, each in commands.items() for row in set_for(settings, name, each)]
        rows += set_for_publishers(settings)
    if as_json:
        listed = [{"command": row.section, "key": row.key, "value": row.value, "from": row.origin} for row in rows]
        print_json({"file": settings.path or None, "settings": listed})
        return
    out.print(f"file: {settings.path or f'none (no {FILE} here)'}", markup=False, highlight=False)
    if not rows:
        out.print("nothing is set: every option has its default")
        return
    table = Table(box=None, header_style="bold")
    for column in ("key", "value", "from", "for"):
        table.add_column(column)
    for (key, value, origin), names in _merged(rows).items():
        table.add_row(key, value, origin, ", ".join(names) if len(names) < 4 else f"{len(names)} commands")
    print_wide(table)


def _merged(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[str]]:
    """(key, value, origin) -> the commands for which that is so."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        merged.setdefault((row.key, _text(row.value), row.origin), []).append(row.section)
    return merged


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else "" if value is None else str(value)
