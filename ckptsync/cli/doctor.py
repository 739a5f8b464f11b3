"""`ckptsync doctor`: can this root carry a channel, and is the channel healthy?"""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.table import Table

from ..channel import Channel
from ..doctor import Check, examine
from .output import BAD, AsJson, Root, out, print_json

_COLOURS = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def run(
    root: Root,
    stage: Annotated[str, typer.Option(help="Where a watcher on this host would stage versions.")] = "/dev/shm",  # noqa: S108
    as_json: AsJson = False,
) -> None:
    """Try the storage and look over the channel. Writes and removes a 32 MB sample. Exit code 1 if anything is bad."""
    checks = list(examine(Channel.open(root), stage))
    ok = all(check.status != "bad" for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": msgspec.to_builtins(checks)})
    else:
        _print(checks)
    if not ok:
        raise typer.Exit(BAD)


def _print(checks: list[Check]) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("check", "", "what was seen", "what to do"):
        table.add_column(column)
    for check in checks:
        table.add_row(check.name, f"[{_COLOURS[check.status]}]{check.status}[/]", check.detail, check.remedy)
    out.print(table)
