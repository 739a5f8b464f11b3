"""The cheapest way to a version: from what is at hand, or from a full version on the store, over deltas.

Nothing is read but manifests. A link that is missing, or known to be damaged, is gone round: over another delta, an
older anchor, at last the base model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..channel import Channel
from ..errors import BrokenChain, Corrupt, NotFound
from ..manifest import Base, Manifest
from ..version import VersionId

Edge = tuple[VersionId, VersionId]
"""(version, base) of one delta."""

REMEDY = "take another version, or let `ckptsync fsck ROOT --repair` make the newest that can be read a full one"


class Link(NamedTuple):
    """One delta to apply: of which version, against which base."""

    manifest: Manifest
    base: Base

    @property
    def edge(self) -> Edge:
        return self.manifest.id, self.base.id


class Chain(NamedTuple):
    """A whole version to start from, and the deltas to apply to it in order; `links` may be empty."""

    start: Manifest
    held: bool
    """Whether the start is at hand, so that the store is not asked for it."""

    links: tuple[Link, ...]

    @property
    def target(self) -> Manifest:
        return self.links[-1].manifest if self.links else self.start

    @property
    def nbytes(self) -> int:
        """Bytes to read from the store."""
        return (0 if self.held else self.start.nbytes) + sum(link.base.nbytes for link in self.links)


def cheapest(
    channel: Channel,
    target: Manifest,
    *,
    held: Callable[[Manifest], bool] | None = None,
    oldest: VersionId | None = None,
    avoid: Mapping[Edge, str] = {},
    damaged: Mapping[VersionId, str] = {},
) -> Chain:
    """The way with the fewest bytes. BrokenChain, naming what is missing or damaged, if there is none.

    `avoid`: the deltas that cannot be used, and why; `damaged`: the versions whose own shards cannot. `held`: what is
    at hand; nothing before `oldest` is. Reads the manifests of all versions that are nearer than the start; those
    before a full one that is whole are not, unless one is at hand.
    """
    problems: list[str] = []
    tie = 0
    ways: list[tuple[int, int, bool, Manifest, tuple[Link, ...]]] = [(0, tie, False, target, ())]
    done: set[VersionId] = set()
    while ways:
        cost, _, ends, manifest, links = heapq.heappop(ways)
        if ends:
            return Chain(manifest, held is not None and held(manifest), links)
        if manifest.id in done:
            continue
        done.add(manifest.id)
        here = held is not None and held(manifest)
        nearer = held is not None and (oldest is None or manifest.id > oldest)
        anchor = manifest.kind == "full" and manifest.id not in damaged
        if manifest.kind == "full" and not anchor:
            problems.append(f"{manifest.id}: {damaged[manifest.id]}")
        if here or anchor:
            tie += 1
            heapq.heappush(ways, (cost + (0 if here else manifest.nbytes), tie, True, manifest, links))
        for base in () if here or (anchor and not nearer) else manifest.deltas:
            link = Link(manifest, base)
            if link.edge in avoid:
                problems.append(f"the delta of {manifest.id} against {base.id}: {avoid[link.edge]}")
            elif (found := _base(channel, link, problems)) is not None:
                tie += 1
                heapq.heappush(ways, (cost + base.nbytes, tie, False, found, (link, *links)))
    raise BrokenChain(f"{target.id} cannot be rebuilt: {'; '.join(dict.fromkeys(problems))}: {REMEDY}")


def _base(channel: Channel, link: Link, problems: list[str]) -> Manifest | None:
    """The base's manifest, if it is still the version that the delta was taken against."""
    try:
        found = channel.manifest(link.base.id)
    except (NotFound, Corrupt) as error:
        problems.append(f"{link.manifest.id} is a delta against {link.base.id}: {error}")
        return None
    if found.content_digest != link.base.content_digest:
        problems.append(f"{link.manifest.id} is a delta against another {link.base.id} than is there")
        return None
    return found
