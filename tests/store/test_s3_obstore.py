"""What is special to uploads through obstore; what all stores promise is in test_contract.py."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import traceback

import pytest

from ckptsync.errors import InvalidInput, NotFound, StoreDenied, StoreUnavailable
from ckptsync.store import open_store, put_bytes, read_bytes
from ckptsync.store.s3 import S3Store, S3Writer
from ckptsync.store.s3_obstore import ObstoreWriter
from tests.servers import seaweed
from tests.servers.fixtures import S3Root
from tests.waiting import until

pytestmark = pytest.mark.s3
MIB = 1 << 20


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("obstore")


@pytest.fixture
def store(s3_root: S3Root) -> S3Store:
    return S3Store(s3_root.url, **s3_root.options, obstore=True)


def uploads(store: S3Store) -> list[str]:
    found = store.call("list", "", "list_multipart_uploads", Prefix=store.key("x")[:-1])
    return [upload["Key"] for upload in found.get("Uploads", [])]


def read_all(store: S3Store, path: str) -> bytes:
    reader = store.open(path)
    back = bytearray(reader.size)
    reader.readinto(0, memoryview(back))
    return bytes(back)


# Which route is taken


def test_it_is_used_where_it_is_installed_and_can_be_told_the_options(s3_root: S3Root) -> None:
    given, never = S3Store(s3_root.url, **s3_root.options), S3Store(s3_root.url, **s3_root.options, obstore=False)
    assert isinstance(given.write("file"), ObstoreWriter)
    assert isinstance(never.write("file"), S3Writer)


@pytest.mark.parametrize(
    "options",
    [
        {"requester_pays": True},
        {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
        {"client_kwargs": {"verify": False}},
        {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:1"}}},
        {"config_kwargs": {"s3": {"use_accelerate_endpoint": False}}},
    ],
)
def test_options_that_it_does_not_know_stay_with_s3fs(s3_root: S3Root, options: dict[str, object]) -> None:
    assert S3Store(s3_root.url, **s3_root.options, **options).bulk() is None
    with pytest.raises(InvalidInput, match=f"cannot be told.*{next(iter(options))}"):
        S3Store(s3_root.url, **s3_root.options, **options, obstore=True).bulk()


def test_credentials_that_it_does_not_know_stay_with_s3fs(s3_root: S3Root, monkeypatch, tmp_path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = {s3_root.options['key']}\n"
        f"aws_secret_access_key = {s3_root.options['secret']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    store = S3Store(s3_root.url, endpoint_url=s3_root.options["endpoint_url"])
    assert store.bulk() is None
    put_bytes(store, "file", bytes(20 * MIB))
    assert read_all(store, "file") == bytes(20 * MIB)


def test_the_usual_environment_variables_are_enough(s3_root: S3Root, s3_server, monkeypatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    store = S3Store(s3_root.url, obstore=True)
    put_bytes(store, "file", bytes(20 * MIB))
    assert read_all(store, "file") == bytes(20 * MIB)


def test_a_key_given_as_an_option_is_not_mixed_with_a_token_of_the_environment(s3_root: S3Root, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-key")
    store = S3Store(s3_root.url, **s3_root.options, obstore=True)
    put_bytes(store, "file", bytes(20 * MIB))
    assert read_all(store, "file") == bytes(20 * MIB)


def test_without_it_the_option_is_refused_and_the_default_stays_with_s3fs(s3_root: S3Root, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="pip install obstore"):
        S3Store(s3_root.url, **s3_root.options, obstore=True)
    assert S3Store(s3_root.url, **s3_root.options).bulk() is None


# Writing


def test_an_upload_that_is_aborted_leaves_no_parts_on_the_server(store: S3Store) -> None:
    writer = store.write("data/shard.bin")
    writer.write(bytes(70 * MIB))
    assert uploads(store) == [store.key("data/shard.bin")]
    writer.abort()
    assert uploads(store) == []


def test_an_abort_touches_no_upload_of_another_file(store: S3Store) -> None:
    other, mine = store.write("data/shard.bin.2"), store.write("data/shard.bin")
    for writer in (other, mine):
        writer.write(bytes(40 * MIB))
    mine.abort()
    other.commit()
    assert read_all(store, "data/shard.bin.2") == bytes(40 * MIB)


def test_an_upload_that_somebody_swept_fails_and_leaves_nothing(store: S3Store) -> None:
    writer = store.write("data/shard.bin")
    writer.write(bytes(40 * MIB))
    until(lambda: uploads(store), what="its upload has begun")
    assert store.sweep("data", grace=-60) == 1
    with pytest.raises((NotFound, StoreUnavailable)):
        writer.commit()
    writer.abort()
    assert uploads(store) == []
    assert list(store.list("")) == []


def test_an_upload_whose_completion_lost_its_answer_is_complete(store: S3Store, monkeypatch) -> None:
    """obstore tries again, and hears that there is no such upload any more."""
    writer = store.write("data/shard.bin")
    writer.write(bytes(40 * MIB))
    real = writer._file

    class Lost:
        def close(self) -> None:
            real.close()
            raise FileNotFoundError("NoSuchUpload")

    writer._file = Lost()
    writer.commit()
    assert read_all(store, "data/shard.bin") == bytes(40 * MIB)


def test_memory_in_an_upload_is_bounded(s3_root: S3Root) -> None:
    """One buffer of 200 MiB is not taken over as a whole."""
    code = """
import json, resource, sys
from ckptsync.store import open_store

store = open_store(sys.argv[1], options=json.loads(sys.argv[2]))
first = store.write("first")
first.write(bytes(20 << 20))
first.abort()
data = bytes(200 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
writer = store.write("file")
writer.write(data)
writer.abort()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    options = {**s3_root.options, "obstore": True, "part_size": 5 * MIB, "in_flight": 2}
    grown = subprocess.run(
        [sys.executable, "-c", code, s3_root.url, json.dumps(options)],
        check=True, timeout=120, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert int(grown) < 80


def test_the_buffer_may_be_reused_also_where_a_part_ends_in_it(store: S3Store) -> None:
    """obstore keeps reading from buffers that it was given."""
    writer, reused, expected = store.write("file"), bytearray(3 * MIB), b""
    for number in range(20):
        reused[:] = bytes([number]) * len(reused)
        writer.write(reused)
        expected += bytes(reused)
    writer.commit()
    assert read_all(store, "file") == expected


# Errors and secrets


def test_a_wrong_secret_is_denied_quickly_and_shown_nowhere(s3_root: S3Root) -> None:
    store = S3Store(s3_root.url, **{**s3_root.options, "secret": "wrong-and-private"}, obstore=True)
    began = time.monotonic()
    for call in (
        lambda: put_bytes(store, "small", b"x"),
        lambda: put_bytes(store, "large", bytes(40 * MIB)),
    ):
        with pytest.raises(StoreDenied) as caught:
            call()
        assert "private" not in "".join(traceback.format_exception(caught.value))
    client = store.bulk()._client
    assert "private" not in repr(client) + repr(client.config)
    assert time.monotonic() - began < 25


@pytest.mark.slow
def test_what_was_begun_before_the_server_went_away_ends_after_the_deadline(tmp_path) -> None:
    server = seaweed.start(str(tmp_path))
    try:
        url = f"s3://{server.bucket}/root"
        store = open_store(url, options={**server.options, "deadline": 1.0, "obstore": True})
        put_bytes(store, "file", bytes(4 * MIB))
        reader = store.open("file")
        writer = store.write("other")
        writer.write(bytes(40 * MIB))
        server.kill()
        for call in (lambda: reader.readinto(0, memoryview(bytearray(4 * MIB))), writer.commit):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                call()
            assert time.monotonic() - began < 25
        writer.abort()
    finally:
        server.kill()


# Processes


def test_a_store_that_was_used_goes_on_through_s3fs_in_a_forked_child(s3_root: S3Root) -> None:
    """obstore hangs there. In a process of its own, since this one has threads by now."""
    code = """
import json, multiprocessing, sys
from ckptsync.store import open_store, put_bytes, read_bytes

store = open_store(sys.argv[1], options=json.loads(sys.argv[2]))
put_bytes(store, "file", bytes(20 << 20))

def child(results):
    put_bytes(store, "child", bytes(20 << 20))
    results.put((store.bulk() is None, read_bytes(store, "file", 20 << 20) == bytes(20 << 20)))

context = multiprocessing.get_context("fork")
results = context.Queue()
process = context.Process(target=child, args=(results,))
process.start()
assert results.get(timeout=60) == (True, True)
process.join(60)
assert process.exitcode == 0
assert store.bulk() is not None
assert read_bytes(store, "child", 20 << 20) == bytes(20 << 20)
"""
    arguments = [s3_root.url, json.dumps({**s3_root.options, "obstore": True})]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_store_that_was_used_can_be_pickled(store: S3Store) -> None:
    put_bytes(store, "file", b"x")
    other = pickle.loads(pickle.dumps(store))
    assert read_bytes(other, "file", 1) == b"x"
    assert isinstance(other.write("file"), ObstoreWriter)
