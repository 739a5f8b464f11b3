"""Versions in the place of whose manifest something else lies: a folder, a link, a pipe.

A store lists plain files alone, so no listing of `manifests/` has these, and they would be taken for versions that were
never there: their data swept as debris, and nobody told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from .layout import MANIFESTS, SELF_COPY, version_of
from .store.base import Store
from .version import VersionId


@runtime_checkable
class TellsKinds(Protocol):
    """A store in which something else than a file can have a file's name."""

    def not_files(self, folder: str) -> Iterator[tuple[str, str]]:
        """(path, what it is, as `a folder`) of all that lies right in `folder` and is no plain file."""
        ...


def replaced_manifests(store: Store) -> dict[VersionId, str]:
    """Version -> what is wrong, in words; ascending. Empty for a store whose names are all of one kind."""
    if not isinstance(store, TellsKinds):
        return {}
    found = {version: f"{path} is {kind}, not a file; {SELF_COPY} in the version's data folder is a copy"
             for path, kind in store.not_files(MANIFESTS) if (version := version_of(path)) is not None}  # fmt: skip
    return dict(sorted(found.items()))
