"""`ckptsync verify`: read the bytes and compare them with what was promised."""

from __future__ import annotations

from typing import Annotated

import typer

from ..channel import Channel
from ..errors import ChannelEmpty, Corrupt
from ..verify import Report, verify_version
from ..version import VersionId, parse_query
from .output import BAD, AsJson, Root, bytes_bar, human_bytes, out, print_json


def run(
    root: Root,
    version: Annotated[
        str, typer.Argument(metavar="[VERSION]", help="latest, 42 or e2-v42; every version without one.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Verify a version's files against its manifest, or those of every version. Exit code 1 if any is bad."""
    channel = Channel.open(root)
    reports = [_verify(channel, found) for found in _asked(channel, version)]
    if as_json:
        print_json({"ok": all(r.ok for r in reports), "versions": [_builtins(r) for r in reports]})
    else:
        for report in reports:
            _print(report)
    if not all(report.ok for report in reports):
        raise typer.Exit(BAD)


def _asked(channel: Channel, text: str) -> list[VersionId]:
    if not text:
        found = channel.committed()
        if not found:
            raise ChannelEmpty(f"{channel.store.url} has no version to verify")
        return found
    query = parse_query(text)
    if query.epoch is not None and query.number is not None:
        return [VersionId(query.epoch, query.number)]
    return [channel.resolve(text).id]


def _verify(channel: Channel, version: VersionId) -> Report:
    try:
        total = channel.manifest(version).nbytes
    except Corrupt:
        total = 0
    with bytes_bar(f"verifying {version}", total) as progress:
        return verify_version(channel, version, progress)


def _builtins(report: Report) -> dict[str, object]:
    problems = [{"file": p.file, "kind": p.kind, "message": p.message} for p in report.problems]
    facts = {"version": report.version.label, "ok": report.ok, "bytes": report.nbytes}
    return {**facts, "problems": problems, "notes": list(report.notes)}


def _print(report: Report) -> None:
    verdict = "[green]ok[/]" if report.ok else "[bold red]bad[/]"
    out.print(f"{report.version}  {verdict}  {human_bytes(report.nbytes)}")
    for problem in report.problems:
        out.print(f"    {problem.file}: {problem.message}", style="red", markup=False, highlight=False)
    for note in report.notes:
        out.print(f"    note: {note}", style="dim", markup=False, highlight=False)
