"""`ckptsync dashboard`: the channel as a page in a browser, live or as one file."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import InvalidInput
from .ending import told_to_end
from .keys import RequireSignature
from .output import AsJson, Root, err, print_line, write_file
from .roots import existing


def run(
    context: typer.Context,
    root: Root,
    address: Annotated[
        str,
        typer.Option("--serve", metavar="[HOST]:PORT", help="Where to serve it; on loopback by default."),
    ] = ":8765",
    output: Annotated[str, typer.Option("--output", "-o", help="Write one look as a file instead, and end.")] = "",
    every: Annotated[float, typer.Option(help="Seconds between two looks at the store.", min=0.2)] = 2.0,
    token: Annotated[
        str, typer.Option(envvar="CKPTSYNC_DASHBOARD_TOKEN", help="The password that browsers are asked for.")
    ] = "",
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Versions by attempt, who serves what, how loads went, and which layers changed. It only reads.

    With --json one line says where the page is.
    """
    from ..dashboard.board import Board
    from ..dashboard.page import static_page
    from ..dashboard.server import serving

    if output and str(getattr(context.get_parameter_source("address"), "name", "")) == "COMMANDLINE":
        raise InvalidInput("--output writes a file and ends, --serve goes on serving: use one of the two")
    board = Board(existing(root, require_signature), every=every)
    if output:
        write_file(output, static_page(board))
        _say(output, as_json)
        return
    stop = told_to_end()
    with serving(board, address, token=token) as server:
        _say(server.url, as_json)
        stop.wait()


def _say(where: str, as_json: bool) -> None:
    if as_json:
        print_line({"page": where})
    else:
        err.print(f"dashboard: {where}", highlight=False)
