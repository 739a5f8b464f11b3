"""A root that somebody typed, for the commands that only read."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .. import layout, logs
from ..assets import CONFIG
from ..channel import Channel
from ..errors import InvalidInput
from ..store import LocalStore, is_there
from ..store.retry import translated

log = logs.get(__name__)

_OURS = {layout.CHANNEL, layout.HEAD, layout.SENT, layout.MIRROR, layout.MANIFESTS, layout.EPOCHS, layout.DATA,
         layout.RECEIPTS, layout.LEASES, layout.PINS, layout.COLLECTED, layout.COLLECTOR}  # fmt: skip
FEW = 3


def existing(root: str, require_signature: str | None = None, sign_key: str | None = None) -> Channel:
    """The channel at `root`. InvalidInput for a folder that is not there: it is never made by looking at it; and for a
    checkpoint, or an exported version. One warning for a folder that holds other things than a channel.

    A watcher waits for a folder that its trainer has yet to make, and says so; of the other commands a person has more
    likely mistyped it. An object store has no folders: there a mistyped prefix is a channel without versions.
    """
    channel = Channel.open(root, require_signature=require_signature, sign_key=sign_key)
    if not is_there(channel.store):
        raise InvalidInput(
            f"{channel.store.url}: there is no such folder; if its trainer has yet to start, make it first"
        )
    if isinstance(channel.store, LocalStore):
        _check_channel(channel.store.url)
    return channel


def _check_channel(path: str) -> None:
    # By its listing: a name that may be made soon is not probed, since NFS remembers "absent" for a minute.
    names = set(translated(f"list {path}", lambda: os.listdir(path)))
    if not names or names & _OURS:
        return
    if layout.SELF_COPY in names:
        raise InvalidInput(
            f"{path} is an exported version and no channel: `ckptsync import ROOT {path}` puts it in one"
        )
    if any(name.endswith(".safetensors") for name in names) and names & {CONFIG, layout.ADAPTER_CONFIG}:
        raise InvalidInput(
            f"{path} is a checkpoint and no channel: `ckptsync publish ROOT --from {path}` puts it in one"
        )
    near = sorted({*_channels_near(path, names)})
    hint = f"; there is one in {', '.join(near[:FEW])}{', ...' * (len(near) > FEW)}" if near else ""
    text = "%s holds no channel, but other things: is that the root?%s"
    log.warning(text, path, hint, extra={"event": "no-channel"})


def _channels_near(path: str, names: set[str]) -> Iterator[str]:
    """Above, where somebody named a folder of a channel, or below."""
    above = os.path.dirname(path)
    for each in (above, os.path.dirname(above), *(os.path.join(path, name) for name in names)):
        if os.path.isfile(os.path.join(each, layout.CHANNEL)):
            yield each
