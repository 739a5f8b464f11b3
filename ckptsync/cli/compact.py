"""`ckptsync compact`: a full version out of a chain of deltas."""

from __future__ import annotations

from typing import Annotated

import typer

from ..channel import Channel
from ..copies import compact
from ..errors import InvalidInput
from ..manifest import Manifest
from .keys import RequireSignature, SignKey
from .newest import Line, moved, span
from .output import AsJson, Root, Version, bytes_bar, human_bytes, out, print_json
from .roots import existing


def run(
    root: Root,
    version: Version = "latest",
    as_newest: Annotated[
        bool, typer.Option("--as-newest", help="Although VERSION is not the newest: readers of latest go back to it.")
    ] = False,
    require_signature: RequireSignature = None,
    sign_key: SignKey = None,
    as_json: AsJson = False,
) -> None:
    """Publish the content of a delta version as a full one, from its chain. No trainer may run: it would be fenced.

    The new version is the newest, in an epoch of its own: readers that follow `latest` go to it. Where versions are
    newer than VERSION these would be left behind, and nothing is done without --as-newest.
    """
    channel = existing(root, require_signature, sign_key)
    manifest, line = channel.resolve(version), Line.of(channel)
    if manifest.kind == "delta" and line.newest != manifest.id and not as_newest:
        raise _refused(channel, manifest)
    # Rebuilt once to find every byte right, and once to copy it.
    with bytes_bar(f"compacting {manifest.id}", 2 * manifest.nbytes) as progress:
        made = compact(channel, manifest, progress=progress)
    left = line.left_since(channel)
    if as_json:
        before = line.newest.label if line.newest else None
        print_json({"version": made.id.label, "from": manifest.id.label, "bytes": made.nbytes,
                    "newest_before": before, "left_behind": [each.label for each in left]})  # fmt: skip
    elif made is manifest:
        out.print(f"{manifest.id} is a full version already")
    else:
        out.print(f"{made.id} is {manifest.id} as a full version ({human_bytes(made.nbytes)})")
        out.print(moved(line.newest, manifest.id, left), highlight=False)


def _refused(channel: Channel, manifest: Manifest) -> InvalidInput:
    newer = [version for version in channel.versions() if version > manifest.id]
    left = f", and {span(newer)} would be left behind" if newer else ""
    root, name = channel.store.url, manifest.id
    return InvalidInput(
        f"{name} is not the newest version, and a full one made of it would be: readers that follow latest would go "
        f"to its weights{left}. To have it whole elsewhere: `ckptsync export {root} {name} DIR`. To make the newest "
        f"one whole: `ckptsync compact {root}`. If readers shall go back: --as-newest"
    )
