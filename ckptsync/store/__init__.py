"""Stores: bytes behind a URL. `open_store` is the way in; `base` says what a store guarantees."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import InvalidInput
from .base import Entry, Reader, Store, Writer, put_bytes, read_bytes
from .hooks import HookedStore
from .local import LocalStore
from .probe import enforces_create

__all__ = [
    "Entry", "HookedStore", "LocalStore", "Reader", "Store", "Writer", "enforces_create", "open_store",
    "put_bytes", "read_bytes",
]  # fmt: skip


def open_store(url: str, *, options: Mapping[str, object] | None = None) -> Store:
    """The store at `url`. Nothing is contacted or made yet.

    A plain path or `file://` is a LocalStore; its options are `mode`, `direct` and `deadline`. `s3://`,
    `gs://`, `az://`, `abfs://` and `memory://` go through fsspec; options are `deadline` (seconds of retries,
    default 30), for S3 `part_size` and `in_flight`, and all others those of the fsspec filesystem. Raises
    InvalidInput for another kind of URL, an unknown option, or a filesystem that is not installed.
    """
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
