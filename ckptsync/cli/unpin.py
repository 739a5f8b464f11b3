"""`ckptsync unpin`: let retention decide about a version again."""

from __future__ import annotations

from .. import holds
from .output import AsJson, Root, Version, out, print_json
from .roots import existing


def run(root: Root, version: Version, as_json: AsJson = False) -> None:
    """Take the pin of a version away. Nothing is deleted by that; the next collection decides."""
    channel = existing(root)
    found = channel.resolve(version).id
    holds.unpin(channel, found)
    if as_json:
        print_json({"version": found.label, "pinned": False})
        return
    out.print(f"{found} is not pinned any more", highlight=False)
