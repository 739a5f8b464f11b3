"""`ckptsync publish`: a Hugging Face folder as a new version."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ..assets import CONFIG, assets_of, model_facts
from ..channel_record import check_not_mirror
from ..errors import InvalidInput, NotFound
from ..layout import SELF_COPY
from ..manifest import MAIN_TRACK
from ..preflight import check_space
from ..store import LocalStore, is_there, open_store
from .fits import check_fits
from .keys import SignKey
from .needs import needs
from .output import AsJson, Root, bytes_bar, human_bytes, human_seconds, out, print_json

if TYPE_CHECKING:
    from ..export.source import CheckpointSource


def run(
    root: Root,
    source: Annotated[str, typer.Option("--from", help="A Hugging Face checkpoint folder with safetensors.")],
    step: Annotated[int | None, typer.Option(help="The trainer's step, recorded in the manifest.")] = None,
    meta: Annotated[list[str] | None, typer.Option(help="key=value, recorded in the manifest; repeatable.")] = None,
    kind: Annotated[
        str, typer.Option(help="full; or delta, what changed since the version before, and a full one now and then.")
    ] = "full",
    allow_schema_change: Annotated[
        bool, typer.Option("--allow-schema-change", help="Other tensors than the version before has: another model.")
    ] = False,
    sign_key: SignKey = None,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint folder. The version is complete when this returns, and does not exist before."""
    if kind not in ("full", "delta"):
        raise InvalidInput(f"--kind {kind} is not known: full and delta are")
    _check_places(root, source)
    metadata = _parse_meta(meta or [])
    needs("torch", "torch")
    from ..delta.policy import DeltaPolicy
    from ..publish import Publisher

    checkpoint = _opened(source)
    _check_publishable(checkpoint, source, step, metadata)
    if not allow_schema_change:
        check_fits(root, source, checkpoint.metadata())
    total = sum(spec.nbytes for spec in checkpoint.metadata())
    check_space(open_store(root), total)
    policy = DeltaPolicy(skip=()) if kind == "delta" else None
    with (
        Publisher(root, delta=policy, sign_key=sign_key) as publisher,
        bytes_bar("publishing", total) as progress,
    ):
        done = publisher.publish(checkpoint, step=step, metadata=metadata, assets=source, progress=progress)
    if as_json:
        facts = {"version": done.version.label, "bytes": done.nbytes, "content_digest": done.content_digest}
        stored = {"kind": done.kind, "stored_bytes": done.stored_bytes}
        print_json({**facts, **stored, "changed": done.changed, "seconds": done.seconds})
        return
    spent = sum(done.seconds.values())
    size = human_bytes(done.nbytes)
    if done.kind == "delta":
        size = f"{human_bytes(done.stored_bytes)} for {size}"
    out.print(f"published {done.version} ({size} in {human_seconds(spent)})")
    if not done.changed:
        out.print("note: the weights equal those of the version before", style="yellow")


def _check_places(root: str, source: str) -> None:
    if not os.path.isdir(source):
        raise InvalidInput(f"--from {source}: there is no such folder")
    if os.path.isfile(os.path.join(source, SELF_COPY)) and not os.path.isfile(os.path.join(source, CONFIG)):
        raise InvalidInput(
            f"--from {source}: it has no {CONFIG}, but {SELF_COPY}: an exported version, which `ckptsync import {root} "
            f"{source}` puts in the channel"
        )
    if not os.path.isfile(os.path.join(source, CONFIG)):
        raise InvalidInput(
            f"--from {source}: it has no {CONFIG}, and no engine opens it without: put the model's there"
        )
    store, folder = open_store(root), os.path.realpath(source)
    if is_there(store):
        check_not_mirror(store)
    if isinstance(store, LocalStore) and os.path.commonpath([os.path.realpath(store.url), folder]) == folder:
        raise InvalidInput(f"{store.url} is in --from {source}: keep the channel out of the checkpoint's folder")


def _opened(source: str) -> CheckpointSource:
    from ..export.source import CheckpointSource

    try:
        return CheckpointSource(source)
    except NotFound as error:
        raise InvalidInput(f"--from {error}") from error


def _check_publishable(checkpoint: CheckpointSource, source: str, step: int | None, metadata: dict[str, str]) -> None:
    """What a publisher would refuse, before an epoch is claimed for it: a claim fences the trainer that runs."""
    from ..export.checks import check_items
    from ..release import Facts, refuse_nothing
    from ..shards.plan import check_specs

    try:
        refuse_nothing(specs := checkpoint.metadata())
        check_specs(specs)
        check_items(dict(checkpoint))
        assets = assets_of(None, source, None)
        model_facts((), assets)
    except InvalidInput as error:
        raise type(error)(f"--from {source}: {error}") from error
    Facts.check(None, step, metadata, None, {MAIN_TRACK: assets})


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
