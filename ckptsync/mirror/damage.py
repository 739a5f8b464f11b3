"""What a destination has lost since it was copied there, by deletion or decay.

Two listings and the manifests tell of what is missing or cut; only reading every byte tells of bytes that are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from ..channel import Channel
from ..errors import Corrupt, NotFound, VersionNotFound
from ..holds import collected_versions
from ..layout import SELF_COPY
from ..manifest import Manifest, Origin
from ..presence import absent_files, sizes
from ..retention import needs_of
from ..version import VersionId, parse_stem
from .files import Piece, missing


def torn(target: Channel) -> Iterator[VersionId]:
    """Versions whose manifest at the destination is none: no reader takes them."""
    for version in target.committed():
        try:
            target.manifest(version)
        except Corrupt:
            yield version
        except VersionNotFound:
            continue  # collected meanwhile


def lost(
    target: Channel, candidates: Iterable[VersionId], wanted: Callable[[VersionId], bool], *, every: bool
) -> list[VersionId]:
    """Those candidates, older than the newest version there, whose manifest is gone, ascending: if a version that is
    there is made from it, or if it is `wanted`.

    A version that the destination's retention let go must not come back: so of those that are wanted only they whose
    data still lie there, while no collector says why; or `every` one, if that was asked for.
    """
    there = set(target.committed())
    newest, noted = max(there, default=None), set(collected_versions(target.store))
    gone = [v for v in sorted(candidates) if newest is not None and v < newest and v not in there and v not in noted]
    if not gone:
        return []
    left = {parse_stem(path.split("/")[1].rpartition("-")[0]) for path in sizes(target.store)}
    needed = {need for manifest in readable(target) for need in needs_of(manifest)}
    return [v for v in gone if v in needed or ((every or v in left) and wanted(v))]


def damaged(target: Channel, *, read: bool) -> Iterator[tuple[Manifest, list[Piece]]]:
    """Every version there of which a file is missing or has another size, with those files; with `read` also those
    whose bytes are wrong, which reads every byte at the destination."""
    manifests = list(readable(target))  # before the listing: what comes meanwhile has its files by then
    listed = sizes(target.store)
    for manifest in manifests:
        if isinstance(manifest.data_of, Origin):
            continue  # its files are those of another version, which is looked at as well
        absent = [Piece(f"{manifest.folder}/{path}", file) for path, file in absent_files(manifest, listed)]
        try:
            pieces = missing(target.store, manifest) if read else absent
        except NotFound:
            continue  # collected meanwhile
        if pieces or listed.get(f"{manifest.folder}/{SELF_COPY}") != len(manifest.encoded):
            yield manifest, pieces


def readable(channel: Channel) -> Iterator[Manifest]:
    """The manifests of the versions that are there and whole, ascending."""
    for version in channel.committed():
        with suppress(Corrupt, VersionNotFound):
            yield channel.manifest(version)
