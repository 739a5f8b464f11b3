"""What the commands share: the console, JSON for scripts, progress bars, and exit codes.

People read stdout through rich; with `--json` exactly one JSON document goes to stdout (or one line per event for
`watch`), and everything else, progress bars included, goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

out = Console(soft_wrap=True)
err = Console(stderr=True, soft_wrap=True)

Root = Annotated[str, typer.Argument(metavar="ROOT", help="A folder (/nfs/run1) or a URL (s3://bucket/run1).")]
Version = Annotated[str, typer.Argument(metavar="VERSION", help="latest, 42 or e2-v42.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]

BAD = 1
"""Exit code: the thing asked about is bad."""

USAGE = 2
"""Exit code: the command was called wrongly."""


def print_json(value: Any) -> None:
    """One JSON document, whole, on stdout."""
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.flush()


def print_line(value: Any) -> None:
    """One JSON document on one line, for streams of events."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes on stderr; silent where stderr is no terminal. Yields the callback to feed."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KB'; powers of 1000, as storage is sold."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def human_seconds(seconds: float) -> str:
    """Seconds as '38 ms', '2.4 s', '7 min', '3 h', '2 d'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.1f} {unit}" if divisor == 1 else f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
