"""Lossless changes against a parent version: the encoding, and versions that are rebuilt from chains of them.

Needs numpy and zstandard, and is several times faster with numba: `pip install 'ckptsync[delta]'`. What is imported
here needs none of them before a delta is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from ..errors import BrokenChain, UnsupportedFormat
from ..presence import lacking
from .policy import DeltaPolicy

if TYPE_CHECKING:
    from ..channel import Channel
    from ..manifest import Manifest
    from ..store.base import Reader, Store
    from ..version import VersionId
    from .publishing import DeltaWriter

    Open = Callable[[str], Reader]


def whole(
    channel: Channel, manifest: Manifest, *, spool: str | None = None, damaged: Mapping[VersionId, str] = {}
) -> AbstractContextManager[tuple[Store, Manifest]]:
    """The version as a full one, and the store to read it from: the channel's own, or one that rebuilds a delta, or a
    full version whose shards are lost and that has deltas as well. `damaged`: versions whose shards are, and why.

    BrokenChain if a delta version's chain is not whole, UnsupportedFormat if this installation cannot read deltas.
    """
    if manifest.kind == "delta" or _is_lost(channel, manifest, damaged):
        return _rebuilt(channel, manifest, spool, damaged)
    return nullcontext((channel.store, manifest.full_form()))


def _is_lost(channel: Channel, manifest: Manifest, damaged: Mapping[VersionId, str]) -> bool:
    """Whether it is worth a look for another way to a full version."""
    return bool(manifest.deltas) and (manifest.id in damaged or bool(lacking(channel.store, manifest)))


@contextmanager
def _rebuilt(
    channel: Channel, manifest: Manifest, spool: str | None, damaged: Mapping[VersionId, str]
) -> Iterator[tuple[Store, Manifest]]:
    with ExitStack() as stack:
        try:
            store = stack.enter_context(open_chain(channel, manifest, spool=spool, damaged=damaged))
        except (BrokenChain, UnsupportedFormat):
            if manifest.kind == "delta":
                raise
            store = channel.store  # who reads it will say what it lacks
        yield store, manifest.full_form()


def open_chain(
    channel: Channel,
    manifest: Manifest,
    *,
    held: Callable[[Manifest], Open | None] | None = None,
    oldest: VersionId | None = None,
    spool: str | None = None,
    damaged: Mapping[VersionId, str] = {},
) -> AbstractContextManager[Store]:
    """A store in which the version's files are those of a full version, made the cheapest way.

    `held` opens the files of a version that is at hand, by their paths in the data folder; none before `oldest` is. The
    deltas' files are copied to `spool` (or the system's folder for temporary files) and verified first; one that is
    damaged is gone round, and so is a full version of which shards are not there, or that is in `damaged`.
    BrokenChain if no way is left, UnsupportedFormat as above.
    """
    with _installed():
        from . import rebuild
    return rebuild.open_chain(channel, manifest, held=held, oldest=oldest, spool=spool, damaged=damaged)


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise UnsupportedFormat(f"delta versions need {error.name}: pip install 'ckptsync[delta]'") from error


def delta_writer(policy: DeltaPolicy | None, writers: Sequence[int]) -> DeltaWriter | None:
    """The part of a publisher that writes deltas, if it is to."""
    if policy is None:
        return None
    with _installed():
        from .publishing import DeltaWriter
    return DeltaWriter(policy, writers)
