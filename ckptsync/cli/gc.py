"""`ckptsync gc`: delete what a retention policy lets go."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.table import Table

from ..collect import Collected, Collector
from ..errors import InvalidInput, StoreDenied
from ..layout import COLLECTOR
from ..retention import Plan, Retention
from ..store.base import Store
from ..store.clock import MARGIN, StoreClock
from ..sweep import sweep_leftovers
from ..wording import counted
from .keys import RequireSignature
from .newest import ranges
from .output import AsJson, Root, human_bytes, human_seconds, out, print_json, print_wide
from .roots import existing

_UNITS = {
    "bytes": {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    "seconds": {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400},
}


def run(
    root: Root,
    keep_last: Annotated[int, typer.Option(help="So many of the newest versions stay; at least 2.")],
    keep_every: Annotated[int | None, typer.Option(help="Numbers that are multiples of this stay too.")] = None,
    max_bytes: Annotated[str, typer.Option(help="History goes beyond so much storage: 500G, 2T.")] = "",
    max_age: Annotated[str, typer.Option(help="History goes when it is older: 12h, 7d.")] = "",
    keep_adapters: Annotated[int, typer.Option(help="--keep-last of adapters: the watchers' staleness + 1.")] = 2,
    drop_branches: Annotated[bool, typer.Option(help="Drop what resumed trainers left behind too.")] = False,
    grace: Annotated[str, typer.Option(help="Data go so long after their version.")] = "5m",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go, and why the rest stays.")] = False,
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Delete versions, the data of those that were deleted longer ago than the grace time, and what killed writers left
    in complete versions more than an hour ago.

    Never deleted: what is leased, pinned, served by a live reader, the newest version, the base model, and what a
    version that stays is made from.
    """
    policy = Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        max_bytes=parse_amount(max_bytes, "bytes", "--max-bytes") if max_bytes else None,
        max_age=parse_amount(max_age, "seconds", "--max-age") if max_age else None,
        keep_adapters=keep_adapters,
        keep_branches=not drop_branches,
        grace=parse_amount(grace, "seconds", "--grace"),
    )
    collector = Collector(existing(root, require_signature), policy)
    if dry_run:
        _say_plan(collector.plan(_clock(collector.channel.store)), as_json)
    else:
        done = collector.collect()
        _say_done(done, sweep_leftovers(collector.channel), policy, as_json)


def _clock(store: Store) -> StoreClock:
    try:
        return StoreClock.ask(store, COLLECTOR)
    except StoreDenied:  # a root that may only be read
        return StoreClock.guess()


def parse_amount(text: str, of: str, option: str) -> int:
    """`500G` bytes, `12h` seconds. InvalidInput, naming the option, for another text."""
    found, units = re.fullmatch(r"(\d+)([A-Za-z]?)B?", text), _UNITS[of]
    if found is None or found[2] not in units:
        raise InvalidInput(
            f"{option} {text!r} is not a whole number, or one with {', '.join(filter(None, units))} after it"
        )
    return int(found[1]) * units[found[2]]


def _say_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        keep = {version.label: why for version, why in plan.keep.items()}
        print_json({"keep": keep, "go": [version.label for version in plan.go]})
        return
    table = Table(box=None, header_style="bold")
    for column in ("version", "", "why"):
        table.add_column(column)
    for version in sorted([*plan.keep, *plan.go]):
        stays = version in plan.keep
        table.add_row(version.label, "stays" if stays else "[red]would go[/]", plan.keep.get(version, ""))
    print_wide(table)


def _say_done(done: Collected, unfinished: int, policy: Retention, as_json: bool) -> None:
    if as_json:
        labels = [version.label for version in done.versions]
        freed = {"files": done.files, "bytes": done.nbytes, "waiting": done.waiting, "unfinished": unfinished}
        print_json({"versions": labels, **freed})
        return
    ended = counted(len(done.versions), "version")
    named = f" ({ranges(done.versions)})" if done.versions else ""
    out.print(
        f"{ended} deleted{named}, {human_bytes(done.nbytes)} of data freed",
        highlight=False,
    )
    if unfinished:
        out.print(f"{counted(unfinished, 'file')} deleted that a killed writer left unfinished", highlight=False)
    if done.waiting:
        after = f"{human_seconds(policy.grace + MARGIN)} after their version"
        out.print(
            f"the data of {counted(done.waiting, 'version')} wait: they go {after} (--grace and a minute, since "
            "two clocks may differ) and when nobody reads them; run it again then, or let the publisher",
            highlight=False,
        )
