"""The command line: one module per command. The composition root, and the only part that knows `watchers`."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

import typer

from .. import __version__
from ..settings import PREFIX, WHERE, Settings
from .ending import exit_code
from .keys import refuse_empty
from .output import Log, LogFormat, LogHandler, Once, json_handler, out
from .settings import WITHOUT, check, defaults

_COMMANDS = {
    "demo": "demo",
    "publish": "publish",
    "ls": "ls",
    "show": "show",
    "verify": "verify",
    "diff": "diff",
    "export": "export",
    "import": "import_",
    "watch": "watch",
    "load": "load",
    "fsck": "fsck",
    "compact": "compact",
    "selfcheck": "selfcheck",
    "doctor": "doctor",
    "gc": "gc",
    "pin": "pin",
    "unpin": "unpin",
    "rollback": "rollback",
    "status": "status",
    "dashboard": "dashboard",
    "config": "config",
    "mirror": "mirror",
    "keygen": "keygen",
}


class _LazyGroup(typer.core.TyperGroup):
    """Imports only the command that runs: `ckptsync ls` starts without torch, and in a fraction of a second.

    The types are click's, which typer carries a copy of in some releases and imports in others: hence Any.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        return load_command(cmd_name)


def load_command(name: str) -> Any:
    """The click command of that name."""
    module = importlib.import_module(f"{__name__}.{_COMMANDS[name]}")
    single = typer.Typer(add_completion=False)
    single.command(name)(module.run)
    return typer.main.get_command(single)


def load_commands() -> dict[str, Any]:
    """All that something can be set for."""
    return {name: load_command(name) for name in _COMMANDS if name not in WITHOUT}


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Carry freshly trained weights from a trainer to inference engines through shared storage.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"ckptsync {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    ctx: typer.Context,
    config: str = typer.Option("", metavar="FILE", help="Settings, instead of ./ckptsync.toml or $CKPTSYNC_CONFIG."),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more: what is tried, and what is retried."),
    log: Log = LogFormat.text,
    _: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print it and exit."),
) -> None:
    as_json = log is LogFormat.json
    handler = json_handler() if as_json else LogHandler()
    if ctx.invoked_subcommand != "watch":  # where a thing that is so again is news
        handler.addFilter(Once())
    quiet = logging.INFO if as_json else logging.WARNING
    level = logging.DEBUG if verbose else quiet
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in ("ckptsync", "watchers"):
        logging.getLogger(name).setLevel(level)
    refuse_empty(os.environ)
    _set_up(ctx, Settings.read(config))


def _set_up(ctx: typer.Context, settings: Settings) -> None:
    """What the call leaves open is taken from the settings: click's `default_map`."""
    ctx.obj, name = settings, ctx.invoked_subcommand or ""
    if settings.tables or any(each.startswith(PREFIX) and each != WHERE for each in settings.environ):
        check(settings, load_commands())
    if name in _COMMANDS and name not in WITHOUT:
        ctx.default_map = {name: defaults(ctx, name, load_command(name), settings)}


def main() -> None:
    """Run the command line. Exit codes: 0 fine, 1 the thing asked about is bad, 2 usage."""
    sys.exit(exit_code(lambda: app(prog_name="ckptsync", standalone_mode=False)))
