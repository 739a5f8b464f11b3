"""Stores: bytes behind a URL. `open_store` is the way in; `base` says what a store guarantees."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from os import PathLike

from ..errors import InvalidInput
from .base import Entry, Reader, Store, Writer, put_bytes, read_bytes
from .hooks import HookedStore
from .local import LocalStore
from .probe import enforces_create, is_there

__all__ = [
    "Entry", "HookedStore", "LocalStore", "Reader", "Store", "Writer", "enforces_create", "is_there", "open_store",
    "put_bytes", "read_bytes", "store_at",
]  # fmt: skip

_MISTYPED = re.compile(r"(s3a?|gs|gcs|az|abfss?|memory|file)(:/*|//+)(.*)", re.IGNORECASE)
"""Taken for a folder, `s3:/bucket/run` would be made below the current one, and the bucket stay empty."""


def open_store(url: str, *, options: Mapping[str, object] | None = None) -> Store:
    """The store at `url`. Nothing is contacted or made yet.

    A plain path or `file://` is a LocalStore; its options are `mode`, `direct` and `deadline`. `s3://`,
    `gs://`, `az://`, `abfs://` and `memory://` go through fsspec; options are `deadline` (seconds of retries,
    default 30), for S3 `part_size` and `in_flight`, and all others those of the fsspec filesystem. Raises
    InvalidInput for another kind of URL or one that is most likely mistyped, an unknown option, or a filesystem
    that is not installed.
    """
    _refuse_mistyped(url)
    given = dict(options or {})
    protocol, separator, rest = url.partition("://")
    try:
        if not separator:
            return LocalStore(url, **given)  # type: ignore[arg-type]
        if protocol in ("file", "local"):
            return LocalStore(rest, **given)  # type: ignore[arg-type]
        if protocol in ("s3", "s3a"):
            from .s3 import S3Store

            return S3Store(url, **given)  # type: ignore[arg-type]
        from .remote import RemoteStore

        return RemoteStore(url, **given)  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidInput(f"options of {protocol if separator else 'a folder'}: {error}") from error


def store_at(root: str | PathLike[str] | Store) -> Store:
    """A store as it is; else the store at that URL or path. InvalidInput for anything else, before its first use."""
    if isinstance(root, str | PathLike):
        return open_store(os.fspath(root))
    if not hasattr(root, "list"):
        raise InvalidInput(f"{root!r} is no root: give a folder, a URL such as s3://bucket/run1, or a Store")
    return root


def _refuse_mistyped(url: str) -> None:
    found = _MISTYPED.fullmatch(url)
    if found is None:
        return
    scheme, rest = found[1].lower(), found[3]
    if not url.startswith(f"{scheme}://"):
        raise InvalidInput(f"{url!r} looks like a mistyped URL: write {scheme}://{rest}, or ./{url} for a folder")
