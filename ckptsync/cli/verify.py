"""`ckptsync verify`: read the bytes and compare them with what was promised."""

from __future__ import annotations

from typing import Annotated

import typer

from ..channel import Channel
from ..channel_record import copied_again
from ..errors import BadManifest, ChannelEmpty, Corrupt, Untrusted, VersionGone, VersionNotFound
from ..layout import manifest_path
from ..replaced import replaced_manifests
from ..verify import Problem, Report, verify_version
from ..version import VersionId
from .keys import RequireSignature
from .output import BAD, AsJson, Root, bytes_bar, human_bytes, out, print_json
from .roots import existing


def run(
    root: Root,
    version: Annotated[
        str, typer.Argument(metavar="[VERSION]", help="latest, 42 or e2-v42; every version without one.")
    ] = "",
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Verify a version's files against its manifest, or those of every version. Exit code 1 if any is bad."""
    channel = existing(root, require_signature)
    reports = [report for found in _asked(channel, version) if (report := _verify(channel, found, bool(version)))]
    if not version:
        reports += [_replaced(*each) for each in replaced_manifests(channel.store).items()]
    ok = all(report.ok for report in reports)
    again = "" if ok else copied_again(channel.store)
    if as_json:
        remedy = {"remedy": again} if again else {}
        print_json({"ok": ok, "versions": [_builtins(r) for r in reports], **remedy})
    else:
        for report in reports:
            _print(report)
        if again:
            out.print(f"this root is a mirror: {again}", markup=False, highlight=False)
    if not ok:
        raise typer.Exit(BAD)


def _asked(channel: Channel, text: str) -> list[VersionId]:
    if not text:
        found = channel.committed()
        if not found:
            raise ChannelEmpty(f"{channel.store.url} has no version to verify")
        return found
    return [channel.identify(text)]


def _verify(channel: Channel, version: VersionId, asked: bool) -> Report | None:
    """None for one of many that retention deleted meanwhile."""
    try:
        with bytes_bar(f"verifying {version}", _size(channel, version)) as progress:
            return verify_version(channel, version, progress)
    except (VersionGone, VersionNotFound):
        if asked:
            raise
        return None


def _replaced(version: VersionId, problem: str) -> Report:
    return Report(version=version, nbytes=0, problems=(Problem(manifest_path(version), BadManifest.kind, problem),))


def _size(channel: Channel, version: VersionId) -> int:
    try:
        return channel.manifest(version).nbytes
    except Corrupt:
        return 0


def _builtins(report: Report) -> dict[str, object]:
    problems = [{"file": p.file, "kind": p.kind, "message": p.message} for p in report.problems]
    facts = {"version": report.version.label, "ok": report.ok, "bytes": report.nbytes}
    return {**facts, "problems": problems, "notes": list(report.notes)}


def _print(report: Report) -> None:
    if {problem.kind for problem in report.problems} == {Untrusted.kind}:
        out.print(f"{report.version}  [bold red]untrusted[/]")  # nothing of it was read: there is no size to tell
    else:
        verdict = "[green]ok[/]" if report.ok else "[bold red]bad[/]"
        out.print(f"{report.version}  {verdict}  {human_bytes(report.nbytes)}")
    for problem in report.problems:
        out.print(f"    {problem.message}", style="red", markup=False, highlight=False)
    for note in report.notes:
        out.print(f"    note: {note}", style="dim", markup=False, highlight=False)
