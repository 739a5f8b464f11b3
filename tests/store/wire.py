"""Faults between s3fs and the network, and what is left on the server."""

from __future__ import annotations

import fsspec
import pytest

from ckptsync.store import Store
from ckptsync.store.s3 import S3Store


def names(store: Store) -> list[str]:
    return sorted(entry.path for entry in store.list(""))


def uploads(store: S3Store) -> int:
    found = store.call("list", "", "list_multipart_uploads", Prefix=store.key("x")[:-1])
    return len(found.get("Uploads", []))


class Interposed:
    """Stands between the store and its client: records every request, and lets `fault` raise before or after
    it."""

    def __init__(self, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.before = lambda method: None
        self.after = lambda method: None
        fs, _ = store._client()
        real = fs._call_s3

        async def call(method, *args, **kwargs):
            self.calls.append(method)
            self.before(method)
            answer = await real(method, *args, **kwargs)
            self.after(method)
            return answer

        monkeypatch.setattr(fs, "_call_s3", call)
        monkeypatch.setattr(fs, "call_s3", lambda *a, **k: fsspec.asyn.sync(fs.loop, call, *a, **k))


def once(method: str, error: Exception):
    """Raises `error` at the first call of `method`."""
    left = [error]

    def fault(called: str) -> None:
        if called == method and left:
            raise left.pop()

    return fault


def always(method: str, error: Exception):
    def fault(called: str) -> None:
        if called == method:
            raise error

    return fault
