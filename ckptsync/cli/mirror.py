"""`ckptsync mirror`: a channel copied to another store, once or as it grows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, get_args

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..errors import InvalidInput
from ..manifest import Kind, Manifest
from ..mirror import Mirror, Mirrored
from ..mirror.mirror import Progress as Told
from ..retention import Retention
from ..store import is_there, open_store
from ..wording import counted
from .ending import as_it_goes, tidies_up, told_to_end
from .gc import parse_amount
from .keys import RequireSignature
from .newest import ranges
from .output import BAD, AsJson, err, human_bytes, out, print_json, print_line
from .roots import existing


def run(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The root to copy, which may be a mirror itself.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="An empty root, or a mirror of the same channel.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on with every new version, until interrupted.")] = False,
    kinds: Annotated[str, typer.Option(help="Which to copy; what they are made from comes along.")] = ",".join(
        get_args(Kind)
    ),
    keep_last: Annotated[
        int | None, typer.Option(help="Keep, and copy, so many of the newest; at least 2. Without it: all.")
    ] = None,
    keep_every: Annotated[int | None, typer.Option(help="With --keep-last: multiples of this number stay too.")] = None,
    max_bytes: Annotated[str, typer.Option(help="With --keep-last: history within so much storage: 500G.")] = "",
    max_age: Annotated[str, typer.Option(help="With --keep-last: history no older than this: 12h, 7d.")] = "",
    keep_adapters: Annotated[int, typer.Option(help="--keep-last of adapters: the watchers' staleness + 1.")] = 2,
    grace: Annotated[str, typer.Option(help="With --keep-last: data go so long after their version.")] = "5m",
    rate: Annotated[str, typer.Option(help="Bytes a second at most: 50M.")] = "",
    repair: Annotated[
        bool, typer.Option("--repair", help="Read every byte at DST, copy again what is wrong or gone there.")
    ] = False,
    poll: Annotated[float, typer.Option(help="With --follow: seconds between looks at SRC.", min=0.01)] = 1.0,
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Copy a channel, one way: data before its manifest, every file verified, what is there already not again.

    Ids, epochs, digests and nonces stay; watchers use DST as they would SRC. Nothing is ever published to DST, and a
    DST that holds anything else is refused. Files and manifests that DST has lost are copied again; --repair also
    finds wrong bytes, and versions that are gone with all their files. With --json one document, or one line for each
    pass with --follow.
    """
    if keep_last is None and (keep_every or max_bytes or max_age):
        raise InvalidInput("--keep-every, --max-bytes and --max-age say what stays besides: give --keep-last too")
    if repair and follow:
        raise InvalidInput("--repair is one run: start it beside the one with --follow, which may go on meanwhile")
    policy = keep_last and Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        max_bytes=parse_amount(max_bytes, "bytes", "--max-bytes") if max_bytes else None,
        max_age=parse_amount(max_age, "seconds", "--max-age") if max_age else None,
        keep_adapters=keep_adapters,
        grace=parse_amount(grace, "seconds", "--grace"),
    )
    origin, destination = existing(source).store, open_store(target)
    if origin.url == destination.url:
        raise InvalidInput(f"{origin.url} cannot be a mirror of itself: name another DST")
    is_there(destination)  # InvalidInput for a file; a folder is made
    stop = told_to_end() if follow else None
    with _bar() as progress:
        mirror = Mirror(
            origin,
            destination,
            kinds=tuple(kind.strip() for kind in kinds.split(",")),  # type: ignore[misc]
            retention=policy or None,
            rate=parse_amount(rate, "bytes", "--rate") if rate else None,
            require_signature=require_signature,
            progress=progress,
            on_version=partial(as_it_goes(_say_version, stop) if stop else _say_version, as_json=as_json),
        )
        if stop is not None:
            _follow(mirror, poll, as_json, stop)
            return
        with tidies_up():
            done = mirror.run(repair=repair)
    if as_json:
        print_json(_facts(done))
    else:
        _say_done(done, mirror)
    if done.skipped:
        raise typer.Exit(BAD)


def _follow(mirror: Mirror, poll: float, as_json: bool, stop: threading.Event) -> None:
    def passed(done: Mirrored) -> None:
        if as_json and (done.copied or done.repaired or done.skipped or (done.collected and done.collected.versions)):
            print_line(_facts(done))

    if not as_json:
        err.print(f"mirroring {mirror.source.store.url} to {mirror.target.store.url}", highlight=False)
    mirror.follow(stop, poll=poll, on_pass=as_it_goes(passed, stop))


@contextmanager
def _bar() -> Iterator[Told]:
    """One bar on stderr for the version that is on its way; silent where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", visible=False)

        def told(manifest: Manifest, done: int, total: int) -> None:
            progress.update(
                task, description=f"mirroring {manifest.id}", completed=done, total=total, visible=done < total
            )

        yield told


def _say_version(manifest: Manifest, as_json: bool) -> None:
    if not as_json:
        stored = human_bytes(manifest.stored_bytes)
        out.print(f"{manifest.id} [green]mirrored[/]  {manifest.kind}, {stored}", highlight=False)


def _facts(done: Mirrored) -> dict[str, object]:
    return {
        "copied": [version.label for version in done.copied],
        "repaired": [version.label for version in done.repaired],
        "skipped": {version.label: why for version, why in done.skipped.items()},
        "bytes": done.nbytes,
        "collected": [version.label for version in done.collected.versions] if done.collected else [],
    }


def _say_done(done: Mirrored, mirror: Mirror) -> None:
    newest = mirror.target.poll()
    if done.repaired:
        names = ", ".join(version.label for version in done.repaired)
        out.print(f"{counted(len(done.repaired), 'version')} repaired: {names}", highlight=False)
    out.print(
        f"{counted(len(done.copied), 'version')} copied ({human_bytes(done.nbytes)}); {mirror.target.store.url} is at "
        f"{newest or 'no version'}", highlight=False,
    )  # fmt: skip
    if done.collected is not None and done.collected.versions:
        went = counted(len(done.collected.versions), "version")
        out.print(f"deleted: {went} that --keep-last lets go ({ranges(done.collected.versions)})", highlight=False)
