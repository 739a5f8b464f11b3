"""`ckptsync watch`: keep one engine on the versions of a channel."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from watchers.health import Health, Receipt
from watchers.watcher import Watcher

from . import engines
from .output import AsJson, Root, err, human_bytes, human_seconds, out, print_line

_COLOURS = {"serving": "green", "refused": "yellow", "failed": "red", "dirty": "bold red"}


def run(
    root: Root,
    engine: engines.Kind,
    url: engines.Url,
    follow: Annotated[
        str, typer.Option(help="latest, every (in order), or a version such as 42 or e2-v42.")
    ] = "latest",
    stage: engines.StageFolder = engines.DEFAULT_STAGE,
    poll: Annotated[float, typer.Option(help="Seconds between looks at the store.", min=0.01)] = 1.0,
    reader: engines.Reader = "",
    pause_mode: engines.PauseMode = "",
    cache: engines.Cache = "",
    api_key: engines.ApiKey = "",
    admin_key: engines.AdminKey = "",
    allow_cast: engines.AllowCast = False,
    as_json: AsJson = False,
) -> None:
    """Find, stage, verify and load each version, until interrupted. With --json one line per attempt.

    Nothing touches the engine before every byte is on this host and verified; after a failed load the last good
    version is loaded again.
    """
    stop = threading.Event()
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, lambda *_: stop.set())
    watcher = Watcher(
        root,
        engines.connect(engine, url, api_key, admin_key, pause_mode, cache),
        follow=follow,
        stage=stage,
        reader=reader or None,
        poll=poll,
        allow_cast=allow_cast,
        on_receipt=lambda receipt: print_receipt(receipt, as_json),
        on_dead=_shout,
    )
    try:
        watcher.run(stop)
    finally:
        watcher.close()


def print_receipt(receipt: Receipt, as_json: bool) -> None:
    """One attempt, as a line for people or for scripts."""
    if as_json:
        print_line(receipt.as_dict())
        return
    times = f"staged {human_seconds(receipt.stage_seconds)}, paused {human_seconds(receipt.pause_seconds)}"
    colour = _COLOURS[receipt.state]
    out.print(f"{receipt.version} [{colour}]{receipt.state}[/]  {human_bytes(receipt.bytes)}, {times}")
    if receipt.error:
        out.print(f"    {receipt.error['kind']}: {receipt.error['message']}", markup=False, highlight=False)
    for warning in receipt.warnings:
        out.print(f"    note: {warning}", style="dim", markup=False, highlight=False)


def _shout(health: Health) -> None:
    err.print(f"the engine is left paused and must be replaced: {health.reason}", style="bold red", markup=False)
