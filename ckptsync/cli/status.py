"""`ckptsync status`: the channel and its readers at a glance, once or live."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .. import logs
from ..errors import StoreError
from ..status import ChannelStatus, EpochStatus, Observer, ReaderStatus, VersionStatus
from ..wording import counted
from .keys import RequireSignature
from .output import AsJson, Root, human_bytes, human_seconds, out, print_json, print_line, print_wide
from .roots import existing

log = logs.get(__name__)

_COLOURS = {"serving": "green", "refused": "yellow", "failed": "red", "dirty": "bold red"}


def run(
    root: Root,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until interrupted.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 2.0,
    last: Annotated[int, typer.Option(help="So many versions of each attempt in the table; 0 for all.", min=0)] = 10,
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Versions and branches, who serves what since when and how far behind, leases, pins, debris and disk use.

    With --json one document, and with --watch besides one on each line.
    """
    observer = Observer(existing(root, require_signature))
    if not watch:
        status = observer.look()
        if as_json:
            print_json(msgspec.to_builtins(status))
        else:
            for part in parts(status, last):
                print_wide(part) if isinstance(part, Table) else out.print(part)
        return
    if as_json:
        for status in _looks(observer, every):
            print_line(msgspec.to_builtins(status))
    with Live(console=out, auto_refresh=False) as live:
        for status in _looks(observer, every):
            live.update(board(status, last), refresh=True)


def _looks(observer: Observer, every: float) -> Iterator[ChannelStatus]:
    """For ever. A store that is away is said, and asked again."""
    while True:
        try:
            yield observer.look()
        except StoreError as error:
            log.warning("%s; trying again", error, extra={"event": "away", "kind": error.kind})
        time.sleep(every)


def board(status: ChannelStatus, last: int) -> RenderableType:
    """All of it as one picture."""
    return Group(*parts(status, last))


def parts(status: ChannelStatus, last: int) -> Iterator[RenderableType]:
    """From the channel to its readers; what is not there has no part."""
    yield Text.assemble((status.root, "bold"), f"  {_summary(status)}")
    if status.versions or status.epochs:
        yield _versions(status, last)
    if status.readers:
        yield Text()
        yield _readers(status)
    yield from map(Text, _holds(status))
    for problem in status.problems:
        yield Text(problem, style="bold red")


def _summary(status: ChannelStatus) -> str:
    complete = sum(not version.problem for version in status.versions)
    newest = next((v for v in status.versions if v.version == status.newest), None)
    age = f", newest {newest.version}, {_ago(newest.created, status.at)} old" if newest else ""
    return f"{counted(complete, 'version')}{age}; {human_bytes(status.disk)} on storage"


def _versions(status: ChannelStatus, last: int) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("attempt", "version", "kind", "step", "size", "stored", "age", "state", "served by"):
        table.add_column(column, justify="right" if column in {"step", "size", "stored", "age"} else "left")
    for epoch in status.epochs:
        own = [version for version in status.versions if version.version.startswith(f"e{epoch.epoch}-")]
        shown = own[-last:] if last else own
        first = _version(shown[0], status) if shown else [f"[dim]{epoch.why_none}[/]"]
        table.add_row(_attempt(epoch, status.at), *first)
        for version in shown[1:]:
            table.add_row("", *_version(version, status))
        if len(shown) < len(own):
            table.add_row("", f"[dim]and {len(own) - len(shown)} before[/]")
    return table


def _attempt(epoch: EpochStatus, now: float) -> str:
    origin = f" from {epoch.resumed_from}" if epoch.resumed_from else ""
    began = f" [dim]{_ago(epoch.created, now)} ago on {epoch.host.partition(':')[0]}[/]" if epoch.created else ""
    return f"e{epoch.epoch}{origin}{began}"


def _version(version: VersionStatus, status: ChannelStatus) -> list[str]:
    if version.problem:
        return [version.version, "", "", "", "", "", "[red]incomplete[/]"]
    marks = [
        "[green]latest[/]" if version.version == status.newest else "" if version.live else "[dim]dead branch[/]",
        f"= {version.data_of}" if version.data_of else "",
        f"on {version.parent}" if version.kind == "delta" else "",
        "pinned" if version.pinned is not None else "",
    ]
    return [
        version.version,
        version.kind,
        "" if version.step is None else str(version.step),
        human_bytes(version.nbytes),
        human_bytes(version.stored),
        _ago(version.created, status.at),
        " ".join(filter(None, marks)),
        _names(version.serving),
    ]


def _readers(status: ChannelStatus) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("reader", "heard", "serves", "since", "behind", "follows", "staged", "paused", "last attempt"):
        table.add_column(column, justify="right" if column in {"heard", "since", "staged", "paused"} else "left")
    for reader in status.readers:
        table.add_row(*_reader(reader, status.at))
    return table


def _reader(reader: ReaderStatus, now: float) -> list[str]:
    behind = f"{counted(reader.lag, 'version')}, {human_seconds(reader.behind)}" if reader.lag else "0"
    attempt = f"[{_COLOURS.get(reader.state, 'dim')}]{reader.state}[/] {reader.version}"
    heard = human_seconds(reader.silent)
    return [
        escape(reader.reader),
        heard if reader.alive else f"[red]silent for {heard}[/]",
        reader.serves or "[dim]nothing[/]",
        _ago(reader.since, now) if reader.since else "",
        behind,
        reader.follow,
        human_seconds(reader.stage_seconds),
        human_seconds(reader.pause_seconds),
        attempt + (f": {escape(reader.error)}" if reader.error else ""),
    ]


def _holds(status: ChannelStatus) -> Iterator[str]:
    for lease in status.leases:
        yield f"{lease.version} is being read by {lease.reader}"
    for version in status.versions:
        if version.pinned is not None:
            yield f"{version.version} is pinned: {version.pinned or '(its pin cannot be read)'}"
        if version.problem:
            yield f"{version.version}: {version.problem}"
    if status.debris:
        size = human_bytes(sum(status.debris.values()))
        yield f"{counted(len(status.debris), 'unfinished attempt')}, {size}: running, or died"
    if status.waiting:
        size = human_bytes(sum(status.waiting.values()))
        yield f"the data of {counted(len(status.waiting), 'collected version')}, {size}, wait for grace time or readers"


def _ago(then: float, now: float) -> str:
    return human_seconds(max(0.0, now - then))


def _names(readers: tuple[str, ...]) -> str:
    more = f" and {len(readers) - 3} more" if len(readers) > 3 else ""
    return escape(", ".join(readers[:3]) + more)
