"""What the commands share: the console, JSON for scripts, progress bars, and exit codes.

People read stdout through rich; with `--json` exactly one JSON document goes to stdout (or one line per event for
`watch`), and everything else, progress bars included, goes to stderr.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segments
from rich.table import Table

from ..errors import InvalidInput
from ..wording import human_bytes as human_bytes


class _Out(Console):
    """Who stopped reading is an error like any other of stdout's: rich's own answer is to end the thread it is in."""

    def on_broken_pipe(self) -> None:
        raise


class _Err(_Out):
    """Says what it can: a log on a full disk, or a terminal that is gone, must not end what is told of there."""

    def print(self, *args: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*args, **options)


out = _Out(soft_wrap=True)
err = _Err(stderr=True, soft_wrap=True)

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


def print_wide(table: Table) -> None:
    """A table at its own width: a narrow terminal, or a pipe, wraps lines and does not squeeze columns."""
    unbounded = out.options.update(width=10_000)
    width = Measurement.get(out, unbounded, table).maximum
    out.print(
        Segments(out.render(table, unbounded.update(width=width))), end=""
    )  # Console.print caps widths at its own


class LogHandler(logging.Handler):
    """One line for each record on stderr, as long as it is: rich's own handler wraps at 80 columns in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))  # else logging's own, which says the level once more

    def emit(self, record: logging.LogRecord) -> None:
        style = "bold red" if record.levelno >= logging.ERROR else "yellow"
        err.print(f"[{style}]{record.levelname.lower()}[/]: ", end="")
        err.print(self.format(record), markup=False, highlight=False)


class LogFormat(enum.StrEnum):
    """For people, or for machines."""

    text = "text"
    json = "json"


Log = Annotated[
    LogFormat,
    typer.Option(envvar="CKPTSYNC_LOG", help="json: one object for each line, from INFO on, on stderr."),
]


def json_handler() -> logging.Handler:
    """Every record on stderr as a line of JSON, also what a receipt on stdout says."""
    from ..logs import JsonFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    return handler


class Once(logging.Filter):
    """Lets each text pass once: the same damage is met again on the way to every version that needs the file."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_new = text not in self._said
        self._said.add(text)
        return is_new


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


def write_file(path: str, data: bytes) -> None:
    """What somebody named to be written. InvalidInput, naming it, if it cannot be."""
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from error


def human_seconds(seconds: float) -> str:
    """Seconds as '38 ms', '2.4 s', '7 min', '3 h', '2 d'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.1f} {unit}" if divisor == 1 else f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
