"""The command line: one module per command. The composition root, and the only part that knows `watchers`."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import typer
from rich.logging import RichHandler

from ..errors import CkptSyncError, InvalidInput
from .output import BAD, USAGE, err, print_json

_COMMANDS = {
    "demo": "demo",
    "publish": "publish",
    "ls": "ls",
    "show": "show",
    "verify": "verify",
    "export": "export",
    "import": "import_",
    "watch": "watch",
    "load": "load",
    "doctor": "doctor",
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
        module = importlib.import_module(f"{__name__}.{_COMMANDS[cmd_name]}")
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(module.run)
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Carry freshly trained weights from a trainer to inference engines through shared storage.",
)


@app.callback()
def _options(
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more: what is tried, and what is retried."),
) -> None:
    level = logging.DEBUG if verbose else logging.WARNING
    handler = RichHandler(console=err, show_path=False, show_time=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    for name in ("ckptsync", "watchers"):
        logging.getLogger(name).setLevel(level)


def main() -> None:
    """Run the command line. Exit codes: 0 fine, 1 the thing asked about is bad, 2 usage."""
    try:
        app(prog_name="ckptsync")
    except CkptSyncError as error:
        sys.exit(_report(error))
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(130)


def _report(error: CkptSyncError) -> int:
    if "--json" in sys.argv:
        print_json({"error": {"kind": error.kind, "message": str(error)}})
    err.print(f"[bold red]{error.kind}[/]: ", end="")
    err.print(str(error), markup=False, highlight=False)
    return USAGE if isinstance(error, InvalidInput) else BAD
