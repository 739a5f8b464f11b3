"""Stores behind fsspec, against a real S3 server; faults are made between s3fs and the network."""

from __future__ import annotations

import os
import threading
import time

import pytest

from ckptsync.errors import (
    AlreadyExists,
    BadShard,
    NotFound,
    StoreError,
    StoreUnavailable,
)  # fmt: skip
from ckptsync.store import put_bytes, read_bytes
from ckptsync.store.remote import RemoteStore
from ckptsync.store.s3 import S3Store
from tests.servers.fixtures import S3Root
from tests.waiting import until

from .conftest import UNUSUAL
from .wire import Interposed, always, names, once, uploads

pytestmark = pytest.mark.s3
MIB = 1 << 20


@pytest.fixture
def s3_root(s3_root: S3Root) -> S3Root:
    """Uploads by s3fs; those by obstore are in test_s3_obstore.py, and reading without s3fs in test_s3_read.py."""
    return S3Root(s3_root.url, {**s3_root.options, "obstore": False})


@pytest.fixture
def store(s3_root: S3Root) -> S3Store:
    return S3Store(s3_root.url, **s3_root.options)


@pytest.fixture
def by_s3fs(s3_root: S3Root) -> S3Store:
    """With settings that only s3fs knows, so that it reads too."""
    return S3Store(s3_root.url, **s3_root.options, **UNUSUAL)


# What it costs


def test_case_40_a_commit_is_one_put_and_nothing_is_renamed_or_copied(store: S3Store, monkeypatch) -> None:
    wire = Interposed(store, monkeypatch)
    put_bytes(store, "data/v1/shard.bin", bytes(33 * MIB))
    store.create("manifests/v1.json", b"{}")
    assert wire.calls == [
        "create_multipart_upload", "upload_part", "upload_part", "upload_part", "complete_multipart_upload",
        "put_object",
    ]  # fmt: skip


def test_a_small_file_is_read_with_one_request(store: S3Store, monkeypatch) -> None:
    put_bytes(store, "head.json", b"{}")
    wire = Interposed(store, monkeypatch)
    assert read_bytes(store, "head.json", 100) == b"{}"
    assert wire.calls == ["get_object"]


def test_uploads_are_not_hashed_for_the_signature_unless_asked_for(store: S3Store, s3_root: S3Root) -> None:
    given = {"s3": {"payload_signing_enabled": True}, "read_timeout": 7}
    other = S3Store(s3_root.url, **s3_root.options, config_kwargs=given)
    for made, signed, timeout in ((store, False, 20), (other, True, 7)):
        config = made._options["config_kwargs"]
        assert config["s3"]["payload_signing_enabled"] is signed
        assert config["read_timeout"] == timeout
    put_bytes(other, "file", b"x")
    assert read_bytes(store, "file", 1) == b"x"


def test_memory_in_an_upload_is_bounded(s3_root: S3Root, monkeypatch) -> None:
    store = S3Store(s3_root.url, **s3_root.options, part_size=5 * MIB, in_flight=2)
    lock, now, most = threading.Lock(), [0], [0]
    real = store.call

    def counting(verb, path, method, **kwargs):
        with lock:
            now[0] += method == "upload_part"
            most[0] = max(most[0], now[0])
        try:
            return real(verb, path, method, **kwargs)
        finally:
            with lock:
                now[0] -= method == "upload_part"

    monkeypatch.setattr(store, "call", counting)
    put_bytes(store, "file", bytes(32 * MIB))
    assert most == [2]
    assert [entry.size for entry in store.list("")] == [32 * MIB]


# Lost answers and lost races


def test_case_44_a_create_whose_answer_was_lost_is_already_there(store: S3Store, monkeypatch) -> None:
    """The channel then reads the file back and finds its own nonce."""
    wire = Interposed(store, monkeypatch)
    wire.after = once("put_object", TimeoutError())
    with pytest.raises(AlreadyExists):
        store.create("manifests/v1.json", b'{"nonce": "mine"}')
    assert read_bytes(store, "manifests/v1.json", 100) == b'{"nonce": "mine"}'


def test_case_44_a_create_that_never_gets_an_answer_is_unknown(s3_root: S3Root, monkeypatch) -> None:
    store = S3Store(s3_root.url, **s3_root.options, deadline=0.3)
    wire = Interposed(store, monkeypatch)
    wire.before = always("put_object", TimeoutError())
    with pytest.raises(StoreUnavailable, match=r"create .*v1\.json.*gave up after"):
        store.create("manifests/v1.json", b"x")


def test_a_conflict_with_a_create_that_then_failed_is_tried_again(store: S3Store, monkeypatch) -> None:
    """409 says that another conditional put is going on, not that it will succeed."""
    from botocore.exceptions import ClientError

    conflict = {"Error": {"Code": "ConditionalRequestConflict"}, "ResponseMetadata": {"HTTPStatusCode": 409}}
    wire = Interposed(store, monkeypatch)
    wire.before = once("put_object", _os_error(ClientError(conflict, "PutObject")))
    store.create("manifests/v1.json", b"mine")
    assert wire.calls == ["put_object", "head_object", "put_object"]
    wire.before = once("put_object", _os_error(ClientError(conflict, "PutObject")))
    with pytest.raises(AlreadyExists):
        store.create("manifests/v1.json", b"other")


def _os_error(cause: Exception) -> OSError:
    """As s3fs raises it."""
    error = OSError(16, "conflict")
    error.__cause__ = cause
    return error


def test_an_upload_whose_completion_lost_its_answer_is_complete(store: S3Store, monkeypatch) -> None:
    wire = Interposed(store, monkeypatch)
    wire.after = once("complete_multipart_upload", TimeoutError())
    put_bytes(store, "data/shard.bin", bytes(20 * MIB))
    assert [entry.size for entry in store.list("")] == [20 * MIB]


def test_an_upload_that_somebody_swept_fails(store: S3Store) -> None:
    writer = store.write("data/shard.bin")
    writer.write(bytes(40 * MIB))
    until(lambda: writer._upload and store.sweep("data", grace=-60), what="its upload has begun and is swept")
    with pytest.raises((NotFound, StoreError)):
        writer.commit()
    writer.abort()
    assert names(store) == []


@pytest.mark.parametrize("method", ["create_multipart_upload", "upload_part", "complete_multipart_upload"])
def test_one_failed_request_of_an_upload_is_repeated(store: S3Store, monkeypatch, method: str) -> None:
    wire = Interposed(store, monkeypatch)
    wire.before = once(method, ConnectionResetError())
    data = os.urandom(MIB) * 40
    put_bytes(store, "data/shard.bin", data)
    reader = store.open("data/shard.bin")
    back = bytearray(len(data))
    reader.readinto(0, memoryview(back))
    assert back == data


def test_an_upload_that_fails_is_aborted(s3_root: S3Root, monkeypatch) -> None:
    store = S3Store(s3_root.url, **s3_root.options, deadline=0.2)
    wire = Interposed(store, monkeypatch)
    wire.before = always("upload_part", ConnectionResetError())
    with pytest.raises(StoreUnavailable, match="write"):
        put_bytes(store, "data/shard.bin", bytes(40 * MIB))
    assert uploads(store) == 0
    assert names(store) == []


def test_case_17_uploads_of_the_dead_are_swept_after_the_grace_time(store: S3Store) -> None:
    dead = store.write("data/v1/shard.bin")
    dead.write(bytes(40 * MIB))
    dead._pipeline.finish()
    assert uploads(store) == 1
    assert store.sweep("data", grace=3600) == 0
    assert store.sweep("manifests", grace=-60) == 0
    assert store.sweep("data", grace=-60) == 1
    assert uploads(store) == 0


# Reading


def test_a_body_that_breaks_off_is_gone_on_with(by_s3fs: S3Store, monkeypatch) -> None:
    from aiobotocore.response import AioStreamingBody

    data = os.urandom(MIB) * 24
    put_bytes(by_s3fs, "data/shard.bin", data)
    reader = by_s3fs.open("data/shard.bin")
    wire = Interposed(by_s3fs, monkeypatch)
    real, reads = AioStreamingBody.read, []

    async def breaking(self, amt=None):
        reads.append(amt)
        if len(reads) == 5:
            raise ConnectionResetError("peer went away")
        return await real(self, amt)

    monkeypatch.setattr(AioStreamingBody, "read", breaking)
    back = bytearray(len(data))
    reader.readinto(0, memoryview(back))
    assert back == data
    assert wire.calls == ["get_object", "get_object"]


def test_a_body_that_ends_early_is_gone_on_with(by_s3fs: S3Store, monkeypatch) -> None:
    from aiobotocore.response import AioStreamingBody

    data = os.urandom(MIB) * 8
    put_bytes(by_s3fs, "data/shard.bin", data)
    reader = by_s3fs.open("data/shard.bin")
    real, reads = AioStreamingBody.read, []

    async def ending(self, amt=None):
        reads.append(amt)
        return b"" if len(reads) == 3 else await real(self, amt)

    monkeypatch.setattr(AioStreamingBody, "read", ending)
    back = bytearray(len(data))
    reader.readinto(0, memoryview(back))
    assert back == data


def test_a_file_that_is_replaced_while_it_is_read_is_a_bad_shard(by_s3fs: S3Store) -> None:
    put_bytes(by_s3fs, "file", b"a" * MIB)
    reader = by_s3fs.open("file")
    put_bytes(by_s3fs, "file", b"b" * MIB)
    with pytest.raises(BadShard, match="replaced"):
        reader.readinto(0, memoryview(bytearray(MIB)))


# The route of the stores that are not S3


class Portable(RemoteStore):
    """S3 the way gs:// and az:// go: fsspec's own file objects."""


def test_the_portable_route_keeps_the_same_promises(s3_root: S3Root) -> None:
    options = {name: value for name, value in s3_root.options.items() if name != "obstore"}
    store, other = (Portable(s3_root.url, **options) for _ in range(2))
    put_bytes(store, "data/first", b"x")
    assert names(other) == ["data/first"]
    data = os.urandom(MIB) * 40
    writer = store.write("data/shard.bin")
    writer.write(data)
    assert names(store) == ["data/first"]
    writer.commit()
    assert names(other) == ["data/first", "data/shard.bin"]
    assert other.open("data/shard.bin").size == len(data)
    store.delete("data/first")
    aborted = store.write("data/aborted.bin")
    aborted.write(data)
    aborted.abort()
    del aborted
    store.create("epochs/e1", b"x")
    with pytest.raises(AlreadyExists):
        store.create("epochs/e1", b"y")
    assert names(store) == ["data/shard.bin", "epochs/e1"]
    reader = store.open("data/shard.bin")
    back = bytearray(len(data))
    reader.readinto(0, memoryview(back))
    assert back == data
    with pytest.raises(NotFound):
        store.open("data")
    store.delete("epochs/e1")
    store.delete("epochs/e1")
    assert names(store) == ["data/shard.bin"]
    assert abs(next(iter(store.list(""))).modified - time.time()) < 60
