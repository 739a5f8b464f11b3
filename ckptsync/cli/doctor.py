"""`ckptsync doctor`: can this root carry a channel, and is the channel healthy?"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from ..doctor import Check, examine
from ..errors import InvalidInput
from ..peer import end_with, serve
from ..promises import examine_promises
from ..store import Store
from .ending import tidies_up
from .output import BAD, AsJson, Root, err, out, print_json
from .roots import existing

_UNTRIED = Check(
    "between two clients", "warn", "not tried: nothing can be written here", "run --full where the root may be written"
)
NAMES = 10
_COLOURS = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def run(
    root: Root,
    stage: Annotated[str, typer.Option(help="Where a watcher on this host would stage versions.")] = "/dev/shm",  # noqa: S108
    full: Annotated[bool, typer.Option(help="Also what the storage promises between two of its clients.")] = False,
    hosts: Annotated[
        int, typer.Option(min=1, max=2, help="With --full: 2 waits for `doctor ROOT --peer` on another host.")
    ] = 1,
    peer: Annotated[bool, typer.Option("--peer", help="Answer a `doctor ROOT --full --hosts 2`.")] = False,
    session: Annotated[str, typer.Option(hidden=True)] = "",
    as_json: AsJson = False,
) -> None:
    """Try the storage and look over the channel. Writes and removes a 32 MB sample. Exit code 1 if anything is bad."""
    if peer and (full or hosts > 1):
        raise InvalidInput("--peer answers a `doctor ROOT --full --hosts 2` elsewhere: give it alone")
    if hosts > 1 and not full:
        raise InvalidInput("--hosts belongs to --full")
    channel = existing(root)
    with tidies_up():
        if peer:
            _answer(root, channel.store, session)
            return
        checks = list(examine(channel, stage))
        if full and any(check.name == "writing" for check in checks):
            checks.append(_UNTRIED)
        elif full and all(check.status != "bad" for check in checks):
            if hosts > 1:
                err.print(
                    f"waiting for `ckptsync doctor {root} --peer` on the other host", markup=False, highlight=False
                )
            checks += examine_promises(root, channel.store, hosts=hosts)
    ok = all(check.status != "bad" for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": msgspec.to_builtins(checks)})
    else:
        _print(checks)
    if not ok:
        raise typer.Exit(BAD)


def _answer(root: str, store: Store, session: str) -> None:
    """As the second process: of the first one that asks, or of the one that started this and holds its stdin."""
    if session:
        end_with(sys.stdin.fileno())
    else:
        err.print(f"waiting for `ckptsync doctor {root} --full --hosts 2` on another host", markup=False)
    print_json({"answered": serve(store, session)})


def _print(checks: list[Check]) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("check", "", "what was seen", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, f"[{_COLOURS[check.status]}]{check.status}[/]", check.detail, check.remedy)
    out.print(table)
    for check in checks:
        for name in check.names[:NAMES]:  # a cell would fold a long name, and nobody could copy it
            out.print(f"{check.name}: {name}", markup=False, highlight=False)
        if len(check.names) > NAMES:
            out.print(f"{check.name}: {len(check.names) - NAMES} more, all of them with --json", highlight=False)
