"""`ckptsync selfcheck`: load a version twice, and compare what the engine computes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from watchers.claims import claimed
from watchers.selfcheck import Verdict, selfcheck
from watchers.watcher import Watcher

from ..wording import counted
from . import engines
from .keys import RequireSignature
from .output import BAD, AsJson, Root, Version, out, print_json
from .roots import existing


def run(
    root: Root,
    version: Version,
    engine: engines.Kind,
    url: engines.Url,
    tokens: Annotated[int, typer.Option(help="How many greedy tokens to compare.", min=1)] = 32,
    atol: Annotated[float, typer.Option(help="How far log-probabilities may be apart.", min=0)] = 1e-3,
    stage: engines.StageFolder = engines.DEFAULT_STAGE,
    reader: engines.Reader = "",
    pause_mode: engines.PauseMode = "",
    cache: engines.Cache = "",
    api_key: engines.ApiKey = "",
    admin_key: engines.AdminKey = "",
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Load the version into the engine twice and compare its greedy answers. Exit code 1 if they differ.

    Some engines compute something else once the very same weights were loaded again. Prints the engine's checksum of
    the version too, for `--trusted` of `watch` and `load`.
    """
    with claimed(stage, url, root):
        watcher = Watcher(
            existing(root).store,
            engines.connect(engine, url, api_key, admin_key, pause_mode, cache),
            follow=version,
            stage=stage,
            reader=reader or None,
            require_signature=require_signature,
        )
        try:
            verdict = selfcheck(watcher, version, count=tokens, atol=atol)
        finally:
            watcher.close()
    if as_json:
        print_json({"same": verdict.same, **asdict(verdict)})
    else:
        _print(verdict)
    if not verdict.same:
        raise typer.Exit(BAD)


def _print(verdict: Verdict) -> None:
    said = "[green]the same[/]" if verdict.same else "[bold red]not the same[/]"
    at = verdict.first_other
    equal = f"all {counted(len(verdict.tokens[0]), 'token')} equal"
    tokens = equal if at is None else f"tokens differ from position {at} on"
    out.print(f"{verdict.version} loaded twice: {said}")
    out.print(f"    {tokens}, log-probabilities at most {verdict.difference:.6f} apart")
    if verdict.fingerprint:
        out.print(f"    content {verdict.content_digest} has checksum {verdict.fingerprint}")
