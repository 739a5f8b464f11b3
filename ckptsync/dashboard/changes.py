"""How much of each layer a version changed: counted in its delta, bounded by digests, or compared on demand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec

from ..channel import Channel
from ..errors import Corrupt, NotFound
from ..manifest import MAIN_TRACK, Manifest, TensorEntry
from ..shards.plan import layer_of


class LayerChange(msgspec.Struct, frozen=True, array_like=True):
    """`changed` of the layer's `elements`; at most so many, if that is all that digests tell."""

    name: str
    elements: int
    changed: int


class VersionChange(msgspec.Struct, frozen=True, kw_only=True):
    """Against the version `base`. `counted` and `compared` are exact; `digests` is an upper bound, since a tensor whose
    digest differs may differ in one element."""

    base: str
    how: Literal["counted", "digests", "compared"]
    elements: int
    changed: int
    layers: tuple[LayerChange, ...]


def quick_change(channel: Channel, manifest: Manifest, before: Manifest | None) -> VersionChange | None:
    """What can be told without reading weights; None if nothing can. `before`: the version before it."""
    try:
        return _counted(channel, manifest) or (_by_digests(before, manifest) if before is not None else None)
    except (Corrupt, NotFound, ModuleNotFoundError):  # damaged, collected meanwhile, or the extra `delta` is missing
        return None


def compared_change(channel: Channel, before: Manifest, manifest: Manifest) -> VersionChange:
    """Exact, by reading the tensors whose digests differ, from both versions: minutes for large models.

    Raises what `compare` raises; ModuleNotFoundError without torch.
    """
    from ..compare import compare

    found = {change.name: change.changed for change in compare(channel, before, manifest).tensors}
    entries = [entry for entry in _entries(manifest) if entry.name in found]
    return _change(before, "compared", entries, lambda entry: found[entry.name])


def _counted(channel: Channel, manifest: Manifest) -> VersionChange | None:
    parent = manifest.parent
    if parent is None or not parent.files or manifest.data_of is not msgspec.UNSET:
        return None  # a way back shares the files of a delta against another version than the one before it
    from ..delta.counts import changed_elements

    found = changed_elements(channel.store, manifest, parent)
    return _change(parent.id.label, "counted", _entries(manifest), lambda entry: found.get(entry.name, 0))


def _by_digests(before: Manifest, manifest: Manifest) -> VersionChange | None:
    known = {entry.name: entry for entry in _entries(before)}
    entries = [e for e in _entries(manifest) if e.name in known and e.spec == known[e.name].spec]
    if before.digest != manifest.digest or not entries:
        return None
    return _change(before, "digests", entries, lambda e: _elements(e) if e.digest != known[e.name].digest else 0)


def _change(
    before: Manifest | str,
    how: Literal["counted", "digests", "compared"],
    entries: list[TensorEntry],
    changed: Callable[[TensorEntry], int],
) -> VersionChange:
    layers: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        layers.setdefault(layer_of(entry.name), []).append(entry)
    rows = tuple(LayerChange(name, sum(map(_elements, own)), sum(map(changed, own))) for name, own in layers.items())
    return VersionChange(
        base=before if isinstance(before, str) else before.id.label,
        how=how,
        elements=sum(row.elements for row in rows),
        changed=sum(row.changed for row in rows),
        layers=rows,
    )


def _entries(manifest: Manifest) -> list[TensorEntry]:
    """Of the main track; ties once."""
    track = manifest.tracks.get(MAIN_TRACK)
    return [entry for entry in track.tensors if not entry.alias_of] if track else []


def _elements(entry: TensorEntry) -> int:
    return math.prod(entry.shape)
