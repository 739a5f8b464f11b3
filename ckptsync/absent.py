"""A version that was asked for and is not there: was it ever? An attempt without versions: had it any?

Once its data are gone nothing names a collected version, so numbers have to tell: within an attempt they only grow, and
most are published. Some never are, since weights may go to engines without files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from .epochs import Epoch
from .errors import BadManifest, Corrupt, NotFound, Untrusted, VersionGone, VersionNotFound
from .manifest import Manifest
from .version import VersionId, VersionQuery

Without = Literal["none yet", "not kept", "none, or not kept"]
"""Not kept: collected, or by a mirror not copied."""


def absent(
    url: str,
    asked: VersionQuery,
    committed: Collection[VersionId],
    claims: Mapping[int, Epoch | None],
    noted: Collection[VersionId],
) -> NotFound:
    """The error to raise: VersionGone if the version was there, or if its number was passed; VersionNotFound if it
    cannot have been. `noted`: versions that a collector's note says it ended."""
    number, name = asked.number or 0, str(asked.number)
    if asked.epoch is not None:
        name = VersionId(asked.epoch, number).label
    resumed = {claim.resumed_from for claim in claims.values() if claim and claim.resumed_from}
    if any(_is(version, asked) for version in (*noted, *resumed)):
        return VersionGone(f"{name} was collected from {url}: it is gone")
    known = {*committed, *noted, *resumed}
    # The base model, number 0, is never collected.
    if number and any(_passed(asked, version, claims) for version in known):
        return VersionGone(f"{name} is not in {url} any more: it was collected, or never published under this number")
    return VersionNotFound(f"{url} has no complete version {name}{_newest(committed, asked.epoch)}")


def none_whole(url: str, live: Sequence[VersionId], manifest: Callable[[VersionId], Manifest]) -> Corrupt:
    """The error to raise where versions are there and none is whole: Untrusted if it is for want of a trusted
    signature, since more likely the key is another one than every version a forgery."""
    why = f"{url} holds versions, but none of them is complete"
    for version in reversed(live):
        try:
            manifest(version)
        except Untrusted as error:
            return Untrusted(f"{why} and signed by a trusted key (is it the right one?): {error}")
        except (Corrupt, VersionNotFound):
            continue
    return BadManifest(f"{why} and live")


def why_none(
    claims: Mapping[int, Epoch | None], committed: Collection[VersionId], noted: Collection[VersionId]
) -> dict[int, Without]:
    """Of each attempt that has no version in the channel, why. `noted` as above.

    The newest attempt may publish still, and its newest version is never collected. An older one cannot any more, and
    nothing tells whether it ever did but that a later one went on from it.
    """
    without = claims.keys() - {version.epoch for version in committed}
    resumed = {claim.resumed_from.epoch for claim in claims.values() if claim and claim.resumed_from}
    published = resumed | {version.epoch for version in noted}
    newest = max(claims, default=0)
    return {
        epoch: "not kept" if epoch in published else "none yet" if epoch == newest else "none, or not kept"
        for epoch in without
    }


def _is(version: VersionId, asked: VersionQuery) -> bool:
    return version.number == asked.number and asked.epoch in {None, version.epoch}


def _passed(asked: VersionQuery, later: VersionId, claims: Mapping[int, Epoch | None]) -> bool:
    """Whether the attempt that published `later` had come by that number before."""
    if asked.epoch not in {None, later.epoch} or later.number <= (asked.number or 0):
        return False
    claim = claims.get(later.epoch)
    return asked.epoch is None or claim is None or (asked.number or 0) >= claim.next_number


def _newest(committed: Collection[VersionId], epoch: int | None) -> str:
    """Of what is there: of that attempt, or of all if nothing is left of it."""
    if not committed:
        return ": there are none yet"
    own = [version for version in committed if version.epoch == epoch]
    return f": the newest of that attempt is {max(own)}" if own else f": the newest is {max(committed)}"
