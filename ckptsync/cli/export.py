"""`ckptsync export`: a version as a plain folder."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..channel import Channel
from ..copies import export_version
from ..errors import InvalidInput
from ..manifest import Manifest
from ..reading import leased
from ..store import LocalStore, Store
from .ending import tidies_up
from .keys import RequireSignature
from .output import AsJson, Root, Version, bytes_bar, human_bytes, out, print_json
from .roots import existing


def run(
    root: Root,
    version: Version,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A new or empty local folder.")],
    in_place: Annotated[
        bool, typer.Option("--in-place", help="DIR holds an older version: apply the deltas since to it.")
    ] = False,
    since: Annotated[
        str,
        typer.Option(
            metavar="OLD",
            help="Write only what changed since this version, for other stacks (`import` does not take it).",
        ),
    ] = "",
    profile: Annotated[
        str,
        typer.Option(
            help="With --since: xor, as slime, miles, vime, SGLang's pull path and stitch read it (the default); "
            "open: indices and values.",
            show_default=False,
        ),
    ] = "",
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Copy a version into a folder that vLLM, SGLang and transformers open as it is. Verified while copied."""
    _check_asked(in_place, since, profile)
    channel = existing(root, require_signature)
    _check_outside(channel.store, folder)
    manifest = channel.resolve(version)
    if since:
        _changes(channel, channel.resolve(since), manifest, folder, profile or "xor", as_json)
        return
    with tidies_up(), bytes_bar(f"exporting {manifest.id}", manifest.nbytes) as progress:
        if in_place:
            from ..delta.inplace import advance

            with leased(channel, manifest.id, "export"):
                advance(channel, folder, manifest, progress)
        else:
            export_version(channel, manifest, folder, progress)
    if as_json:
        print_json({"version": manifest.id.label, "folder": folder, "bytes": manifest.nbytes})
        return
    out.print(f"{manifest.id} is in {folder} ({human_bytes(manifest.nbytes)}, verified)")


def _check_asked(in_place: bool, since: str, profile: str) -> None:
    if in_place and since:
        raise InvalidInput(
            "--in-place brings a folder that holds a version forward, --since writes changes alone into a new one: "
            "give one of the two (--in-place finds out by itself what DIR holds)"
        )
    if profile and not since:
        raise InvalidInput(f"--profile {profile} is how changes are written: say with --since what they are against")


def _check_outside(store: Store, folder: str) -> None:
    if isinstance(store, LocalStore) and f"{os.path.realpath(folder)}/".startswith(f"{os.path.realpath(store.url)}/"):
        raise InvalidInput(f"{folder} is in the channel's own root: name a folder outside")


def _changes(channel: Channel, old: Manifest, new: Manifest, folder: str, profile: str, as_json: bool) -> None:
    from ..delta.profiles import write_profile

    with tidies_up(), leased(channel, old.id, "export"), leased(channel, new.id, "export"):
        folder = write_profile(channel, old, new, folder, profile)
    nbytes = sum(entry.stat().st_size for entry in os.scandir(folder))
    if as_json:
        print_json({"version": new.id.label, "since": old.id.label, "folder": folder, "bytes": nbytes})
        return
    out.print(f"what changed from {old.id} to {new.id} is in {folder} ({human_bytes(nbytes)})")
