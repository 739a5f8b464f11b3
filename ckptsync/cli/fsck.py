"""`ckptsync fsck`: is everything still there that versions are made from?"""

from __future__ import annotations

from typing import Annotated

import typer

from ..channel_record import copied_again
from ..fsck import Finding, fsck, live_of, needed, repair
from ..manifest import Manifest, Origin
from ..version import VersionId
from ..wording import counted
from .keys import RequireSignature, SignKey
from .newest import Line, moved
from .output import BAD, AsJson, Root, bytes_bar, out, print_json
from .roots import existing


def run(
    root: Root,
    mend: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Make the newest version that can be read a full one; reads the one that it is made from. No trainer "
            "may run.",
        ),
    ] = False,
    require_signature: RequireSignature = None,
    sign_key: SignKey = None,
    as_json: AsJson = False,
) -> None:
    """Look for missing files, broken links between deltas and damaged deltas. Exit code 1 if it is the newest version
    that cannot be read; one that was left behind, or that the newest is not made from, is named and harms no reader of
    `latest`.

    `verify` reads the bytes of full versions besides.
    """
    channel = existing(root, require_signature, sign_key)
    line = Line.of(channel)
    with bytes_bar("checking deltas", 0) as progress:
        findings = fsck(channel, progress, read_newest=mend)
        made = repair(channel, progress) if mend and findings else None
    left = line.left_since(channel) if made is not None else []
    bad, live = needed(channel, findings), live_of(channel, findings)
    if as_json:
        found = [{"version": f.version.label, "lost": f.lost, "live": f.version in live, "needed": f in bad,
                  "message": f.message} for f in findings]  # fmt: skip
        print_json({"findings": found, "repaired": made.id.label if made else None,
                    "left_behind": [version.label for version in left]})  # fmt: skip
    else:
        if made is not None:
            _print_repaired(made, line, left)
        _print(findings, bad, live, read_newest=mend)
        if findings and not mend:
            out.print(_remedy(root, copied_again(channel.store), line, bad), end="", markup=False, highlight=False)
    if bad:
        raise typer.Exit(BAD)


def _print_repaired(made: Manifest, line: Line, left: list[VersionId]) -> None:
    source = made.data_of.id if isinstance(made.data_of, Origin) else made.previous
    out.print(f"repaired: {made.id} now holds the weights of {source}", style="green", highlight=False)
    if left:
        out.print(moved(line.newest, made.id, left), highlight=False)


def _remedy(root: str, again: str, line: Line, bad: list[Finding]) -> str:
    """One line, or none: a manifest that is torn or replaced says itself what helps."""
    if not again and any(finding.version == line.newest for finding in bad):
        again = f"`ckptsync fsck {root} --repair` makes the newest that can be read a full one"
    return again and f"{again}\n"


def _print(findings: list[Finding], bad: list[Finding], live: set[VersionId], *, read_newest: bool) -> None:
    for finding in findings:
        where = "" if bad or not finding.lost else " (the newest version is not made from it)"
        if finding.version not in live:
            where = " (left behind: nobody who follows latest goes there)"
        style = "red" if finding in bad else "yellow"
        out.print(f"{finding.version}: {finding.message}{where}", style=style, markup=False, highlight=False)
    said = counted(len(findings), "finding")
    besides = ", but for the one that the newest is made from" if read_newest else ""
    out.print(f"{said}; the bytes of full versions were not read{besides}: `ckptsync verify` does that")
