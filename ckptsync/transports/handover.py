"""What a file version says of how its weights were sent, for watchers: whose turn is it on an engine?

An engine has two who may load it: a watcher, from files, and the trainer, by a fast path. They never talk. A watcher
leaves an engine alone that somebody else has paused, as a fast path does from its first tensor to its confirmation;
a version that comes by files *because* the fast path broke off says so, and takes the engine over at once.
"""

from __future__ import annotations

from typing import Any

from ..manifest import Manifest

FILES = "checkpoint"
"""Name of the transport that leaves the loading to watchers."""

_KEY = "sent_by"


def sent_by(transport: str) -> dict[str, Any]:
    """Metadata of a version that went to engines by this transport."""
    return {_KEY: transport}


def takes_over(manifest: Manifest) -> bool:
    """Whether the trainer has let go of its engines for watchers to load this version."""
    return manifest.metadata.get(_KEY) == FILES
