"""`ckptsync publish`: a Hugging Face folder as a new version."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..errors import InvalidInput
from .needs import needs
from .output import AsJson, Root, bytes_bar, human_bytes, human_seconds, out, print_json


def run(
    root: Root,
    source: Annotated[str, typer.Option("--from", help="A Hugging Face checkpoint folder with safetensors.")],
    step: Annotated[int | None, typer.Option(help="The trainer's step, recorded in the manifest.")] = None,
    meta: Annotated[list[str] | None, typer.Option(help="key=value, recorded in the manifest; repeatable.")] = None,
    kind: Annotated[str, typer.Option(help="What to publish: full.")] = "full",
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint folder. The version is complete when this returns, and does not exist before."""
    if kind != "full":
        raise InvalidInput(f"--kind {kind} is not known: full is")
    if not os.path.isdir(source):
        raise InvalidInput(f"--from {source}: there is no such folder")
    metadata = _parse_meta(meta or [])
    needs("torch", "torch")
    from ..export.source import CheckpointSource
    from ..publish import Publisher

    checkpoint = CheckpointSource(source)
    total = sum(spec.nbytes for spec in checkpoint.metadata())
    with Publisher(root) as publisher, bytes_bar("publishing", total) as progress:
        done = publisher.publish(checkpoint, step=step, metadata=metadata, assets=source, progress=progress)
    if as_json:
        facts = {"version": done.version.label, "bytes": done.nbytes, "content_digest": done.content_digest}
        print_json({**facts, "changed": done.changed, "seconds": done.seconds})
        return
    spent = sum(done.seconds.values())
    out.print(f"published {done.version} ({human_bytes(done.nbytes)} in {human_seconds(spent)})")
    if not done.changed:
        out.print("note: the weights equal those of the version before", style="yellow")


def _parse_meta(pairs: list[str]) -> dict[str, str]:
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidInput(f"--meta {pair!r} is not key=value")
        if key in parsed:
            raise InvalidInput(f"--meta {key} is given twice")
        parsed[key] = value
    return parsed
