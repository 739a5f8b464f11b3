"""Is a checkpoint the model that the channel has versions of? Asked before an epoch is claimed."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..assets import CONFIG, model_facts
from ..channel import Channel
from ..errors import ChannelEmpty, Corrupt, InvalidInput
from ..manifest import MAIN_TRACK, Manifest, TensorSpec
from ..schema_change import schema_change


def check_fits(root: str, folder: str, specs: Iterable[TensorSpec]) -> None:
    """InvalidInput if the newest version has other tensors or another architecture: engines that follow the channel
    would refuse this one."""
    newest = _newest(Channel.open(root))
    if newest is None or newest.kind == "adapter" or MAIN_TRACK not in newest.tracks:
        return
    track, tensors = newest.tracks[MAIN_TRACK], {spec.name: spec for spec in specs}
    with open(os.path.join(folder, CONFIG), "rb") as file:
        architecture = model_facts((), {CONFIG: file.read()}).get("architecture", "")
    before = track.model.get("architecture", architecture)
    differs = [f"{architecture}, and {before} before"] if architecture and architecture != before else []
    # A tied weight may be stored under both names, or under one.
    old = {t.name: t.spec for t in track.tensors if not t.alias_of or t.name in tensors}
    if differs := [*differs, *schema_change(old, tensors).lines()]:
        raise InvalidInput(
            f"{folder} is another model than {newest.id}: {'; '.join(differs)}. Name a root of its own, or say "
            "--allow-schema-change"
        )


def _newest(channel: Channel) -> Manifest | None:
    try:
        return channel.latest()
    except (ChannelEmpty, Corrupt):
        return None
