"""Who may use a remote store, from which processes, for how long; and a server that goes away."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import fsspec
import psutil
import pytest

from ckptsync.errors import (
    InvalidInput,
    NotFound,
    StoreDenied,
    StoreUnavailable,
)  # fmt: skip
from ckptsync.store import open_store, put_bytes, read_bytes
from ckptsync.store.remote import RemoteStore
from ckptsync.store.s3 import S3Store
from tests.servers import seaweed
from tests.servers.fixtures import S3Root
from tests.waiting import until

from .races import won_by_two

pytestmark = pytest.mark.s3
MIB = 1 << 20


@pytest.fixture
def s3_root(s3_root: S3Root) -> S3Root:
    """Uploads by s3fs; those by obstore are in test_s3_obstore.py, and reading without s3fs in test_s3_read.py."""
    return S3Root(s3_root.url, {**s3_root.options, "obstore": False})


@pytest.fixture
def store(s3_root: S3Root) -> S3Store:
    return S3Store(s3_root.url, **s3_root.options)


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
    assert time.monotonic() - began < 25


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
assert results.get(timeout=60) == 1 << 20
process.join(60)
assert process.exitcode == 0
assert read_bytes(store, "child", 10) == b"y"
assert len(read_bytes(store, "file", 1 << 20)) == 1 << 20
"""
    arguments = [s3_root.url, json.dumps(s3_root.options)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_of_two_processes_that_create_one_name_one_wins(s3_root: S3Root) -> None:
    assert won_by_two(s3_root.url, s3_root.options, 20) == 20


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
    until(lambda: not opened & ports(s3_server), 60, "its connections are closed")


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
    put_bytes(store, "before", data)
    reader, buffer = store.open("before"), bytearray(len(data))
    writer = store.write("data/shard.bin")
    writer.write(data[: 20 * MIB])
    own_server.stop()
    began = time.monotonic()
    with back_after(10, own_server), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reader.readinto, 0, memoryview(buffer))
        writer.write(data[20 * MIB :])
        writer.commit()
        reading.result()
    assert time.monotonic() - began > 9
    assert buffer == data == read_bytes(store, "data/shard.bin", len(data))
    assert "trying again" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("obstore", [False, True])
def test_a_server_that_stays_away_is_a_transient_error_after_the_deadline(
    own_server: seaweed.S3Server, obstore: bool
) -> None:
    url = f"s3://{own_server.bucket}/root"
    store = open_store(url, options={**own_server.options, "deadline": 1.0, "obstore": obstore})
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
        assert time.monotonic() - began < 25
