"""Stores behind fsspec, against a real S3 server; faults are made between s3fs and the network, or by the
server."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator

import fsspec
import psutil
import pytest

from ckptsync.errors import (
    AlreadyExists,
    BadShard,
    InvalidInput,
    NotFound,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)  # fmt: skip
from ckptsync.store import Store, open_store, put_bytes, read_bytes
from ckptsync.store.remote import RemoteStore
from ckptsync.store.s3 import S3Store
from tests.servers import seaweed
from tests.servers.fixtures import S3Root

from .conftest import UNUSUAL

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
    time.sleep(0.01)
    while not (writer._upload and store.sweep("data", grace=-60)):
        pass
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


# Credentials and settings


def test_a_wrong_secret_is_denied_quickly_and_not_repeated_in_messages(s3_root: S3Root) -> None:
    store = open_store(s3_root.url, options={**s3_root.options, "secret": "wrong-and-private"})
    began = time.monotonic()
    for call in (
        lambda: list(store.list("")),
        lambda: store.open("head.json"),
        lambda: put_bytes(store, "head.json", b"x"),
        lambda: store.create("epochs/e1", b"x"),
        lambda: store.delete("head.json"),
    ):
        with pytest.raises(StoreDenied) as caught:
            call()
        assert "private" not in str(caught.value) + repr(caught.value) + repr(store)
    assert time.monotonic() - began < 10


def test_no_credentials_at_all_are_denied(s3_root: S3Root, monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {"endpoint_url": s3_root.options["endpoint_url"]}
    for extra in ({}, {"anon": True}):
        with pytest.raises(StoreDenied):
            put_bytes(open_store(s3_root.url, options={**options, **extra}), "file", b"x")


def test_the_usual_environment_variables_are_enough(s3_root: S3Root, s3_server, monkeypatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    put_bytes(open_store(s3_root.url), "file", b"x")
    assert read_bytes(open_store(s3_root.url, options=s3_root.options), "file", 1) == b"x"


def test_a_bucket_that_is_not_there_is_not_an_empty_one(s3_root: S3Root) -> None:
    store = open_store("s3://no-such-bucket/root", options=s3_root.options)
    with pytest.raises(NotFound):
        list(store.list(""))
    with pytest.raises(NotFound):
        put_bytes(store, "file", b"x")


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("hf://datasets/x", {}, "hf:// is not a store"),
        ("simplecache::s3://bucket/x", {}, "is not a store"),
        ("s3://", {}, "names no bucket"),
        ("s3://bucket", {"part_size": 1}, "part_size"),
        ("", {}, "not a folder"),
        ("/tmp/x", {"endpoint_url": "http://x"}, "endpoint_url"),
    ],
)
def test_urls_and_options_that_cannot_work_are_refused_at_once(url: str, options: dict, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        open_store(url, options=options)


@pytest.mark.parametrize("protocol", ["gs", "az"])
def test_a_filesystem_that_is_not_installed_is_named(protocol: str, monkeypatch) -> None:
    def missing(name: str):
        raise ImportError(name)

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(InvalidInput, match=r"pip install (gcsfs|adlfs)"):
        open_store(f"{protocol}://bucket/x")


def test_a_password_in_the_url_is_not_shown() -> None:
    store = RemoteStore("memory://me:hunter2@host/root")
    assert "hunter2" not in store.url + repr(store)


# Processes


def test_a_store_that_was_used_works_in_a_forked_child(s3_root: S3Root) -> None:
    """s3fs clients do not survive a fork. In a process of its own, since this one has threads by now."""
    code = """
import json, multiprocessing, sys
from ckptsync.store import open_store, put_bytes, read_bytes

store = open_store(sys.argv[1], options=json.loads(sys.argv[2]))
put_bytes(store, "file", bytes(1 << 20))
assert len(read_bytes(store, "file", 1 << 20)) == 1 << 20

def child(results):
    put_bytes(store, "child", b"y")
    results.put(len(read_bytes(store, "file", 1 << 20)))

context = multiprocessing.get_context("fork")
results = context.Queue()
process = context.Process(target=child, args=(results,))
process.start()
assert results.get(timeout=20) == 1 << 20
process.join(20)
assert process.exitcode == 0
assert read_bytes(store, "child", 10) == b"y"
assert len(read_bytes(store, "file", 1 << 20)) == 1 << 20
"""
    arguments = [s3_root.url, json.dumps(s3_root.options)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _create_until_one_wins(root: S3Root, barrier, results) -> None:
    store = open_store(root.url, options=root.options)
    won = 0
    for number in range(20):
        barrier.wait(60)
        try:
            store.create(f"epochs/e{number}", f"{os.getpid()}".encode())
            won += 1
        except AlreadyExists:
            pass
    results.put(won)


def test_of_two_processes_that_create_one_name_one_wins(s3_root: S3Root) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_create_until_one_wins, args=(s3_root, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert sum(results.get(timeout=60) for _ in processes) == 20
    for process in processes:
        process.join()


# Connections


def ports(server: seaweed.S3Server) -> set[int]:
    """Our ends of this process's connections to the server."""
    every = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in every if c.raddr and c.raddr.port == server.ports["s3.port"]}


@pytest.mark.parametrize("drop", ["collected", "closed"])
def test_a_store_that_is_dropped_or_closed_keeps_no_connection(s3_root: S3Root, s3_server, drop: str) -> None:
    before = ports(s3_server)
    store = S3Store(s3_root.url, **s3_root.options)
    put_bytes(store, "file", bytes(40 * MIB))
    read_bytes(store, "file", 40 * MIB)
    opened = ports(s3_server) - before
    assert opened
    if drop == "closed":
        store.close()
    else:
        del store
    gc.collect()
    end = time.monotonic() + 20
    while opened & ports(s3_server):
        assert time.monotonic() < end, "its connections are still open"
        time.sleep(0.05)


def test_a_store_that_was_closed_can_be_used_again(store: S3Store) -> None:
    put_bytes(store, "file", b"x")
    reader = store.open("file")
    store.close()
    store.close()
    reader.readinto(0, memoryview(bytearray(1)))
    assert read_bytes(store, "file", 1) == b"x"


@pytest.mark.parametrize("obstore", [False, True])
@pytest.mark.parametrize("end", ["collected", "alive at the end"])
def test_no_warning_comes_of_a_store_that_nobody_closed(s3_root: S3Root, end: str, obstore: bool) -> None:
    code = """
import gc, json, sys
from ckptsync.store import open_store, put_bytes, read_bytes

store = open_store(sys.argv[1], options=json.loads(sys.argv[2]))
put_bytes(store, "file", bytes(40 << 20))
assert len(read_bytes(store, "file", 40 << 20)) == 40 << 20
left = store.open("file")
broken = store.write("broken")
broken.write(bytes(20 << 20))
broken.abort()
if sys.argv[3] == "collected":
    del store, left, broken
    gc.collect()
"""
    arguments = [s3_root.url, json.dumps({**s3_root.options, "obstore": obstore}), end]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", code, *arguments],
        check=False, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # asyncio's debug mode, which -X dev turns on, also says what took longer than 0.1 s.
    assert [line for line in done.stderr.splitlines() if not line.startswith("Executing <")] == []


# A server that goes away


@pytest.fixture
def own_server(tmp_path):
    server = seaweed.start(str(tmp_path))
    yield server
    server.kill()


@contextlib.contextmanager
def back_after(seconds: float, server: seaweed.S3Server) -> Iterator[None]:
    back = threading.Timer(seconds, server.launch)
    back.start()
    try:
        yield
    finally:
        back.join()


@pytest.mark.slow
@pytest.mark.parametrize("obstore", [False, True])
def test_a_server_that_is_away_for_ten_seconds_is_survived(own_server: seaweed.S3Server, caplog, obstore) -> None:
    options = {**own_server.options, "obstore": obstore}
    store = open_store(f"s3://{own_server.bucket}/{uuid.uuid4().hex}", options=options)
    data = os.urandom(MIB) * 40
    writer = store.write("data/shard.bin")
    writer.write(data[: 20 * MIB])
    own_server.stop()
    began = time.monotonic()
    with back_after(10, own_server):
        writer.write(data[20 * MIB :])
        writer.commit()
    assert time.monotonic() - began > 9
    reader = store.open("data/shard.bin")
    buffer = bytearray(len(data))
    own_server.kill()
    with back_after(10, own_server):
        reader.readinto(0, memoryview(buffer))
    assert buffer == data
    assert "trying again" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("obstore", [False, True])
def test_a_server_that_stays_away_is_a_transient_error_after_the_deadline(
    own_server: seaweed.S3Server, obstore: bool
) -> None:
    url = f"s3://{own_server.bucket}/root"
    store = open_store(url, options={**own_server.options, "deadline": 2.0, "obstore": obstore})
    put_bytes(store, "file", b"x")
    own_server.kill()
    for call in (
        lambda: list(store.list("")),
        lambda: store.open("file"),
        lambda: put_bytes(store, "file", bytes(20 * MIB)),
        lambda: store.create("epochs/e1", b"x"),
        lambda: store.delete("file"),
    ):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer" if obstore else "gave up after"):
            call()
        assert time.monotonic() - began < 10


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
