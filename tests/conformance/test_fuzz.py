"""Damaged bytes, by the thousand: a typed error or a right answer, within bounded memory and time.

hypothesis looks for clever bytes elsewhere, a hundred at a time; here they are plain and many. `CKPTSYNC_FUZZ` is how
many of each kind, `CKPTSYNC_FUZZ_SEED` which.
"""

from __future__ import annotations

import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import msgspec
import numpy as np
import pytest

from ckptsync.canonical import canonical
from ckptsync.channel import Channel
from ckptsync.delta import codec, modes
from ckptsync.digest import sha256
from ckptsync.errors import BadShard, CkptSyncError, Corrupt
from ckptsync.http_server import Request
from ckptsync.layout import HEAD
from ckptsync.manifest import decode
from ckptsync.shards.index import read_index
from ckptsync.shards.read import read_header
from ckptsync.testing import MemoryStore
from ckptsync.version import VersionId
from tests.core.manifests import manifest, tensor, track
from tests.delta.test_codec import BLOCK, blob_of_mode
from tests.model.worlds import published
from tests.shards.files import MemoryReader, raw_shard
from tests.watcher.sidecars import StandIn
from tests.watcher.test_sidecar_http import READY, never
from watchers.metrics import Metrics
from watchers.sidecar import Sidecar

CASES = int(os.environ.get("CKPTSYNC_FUZZ", "2000"))
SEED = int(os.environ.get("CKPTSYNC_FUZZ_SEED", "0"))

SECONDS, MOST_BYTES = 5.0, 64 << 20
"""Of this process's own time for one case, and of memory for the first `TRACED`: to trace it costs twice the time."""

TRACED = 500

TOKENS = [
    b"-1",
    b"0",
    b"1e999",
    b"18446744073709551616",
    b"null",
    b'""',
    b"[]",
    b"{}",
    b"[[[[[[[[",
    b"\xff\xfe",
    b"\\ud800",
]


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with one to four things wrong."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randint(0, len(found)), rng.choice((0, 1, 1, 2, 8, 64))
        match rng.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                found[at : at + size] = rng.randbytes(size)
            case 2:
                del found[at : None if size == 64 else at + size]
            case 3:
                found[at:at] = found[at : at + size]
            case 4:
                found[at : at + size] = rng.choice(TOKENS)
            case _:
                found[at : at + 8] = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
    return bytes(found)


def otherwise(value: Any, rng: random.Random) -> Any:
    """The same JSON with one value replaced by another, dropped or put elsewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: otherwise(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], otherwise(value[at], rng), *value[at + (rng.random() < 0.9) :]]
    odd = [None, True, -1, 0, 1, 2**62, 2**64, 1e300, "", "../x", "a/b", "\0", "F32", "model", [], {}, [[]], value]
    return rng.choice(odd)


def corpus(*good: bytes) -> Callable[[random.Random], bytes]:
    return lambda rng: damaged(rng.choice(good), rng)


MANIFESTS = [
    manifest().encoded,
    manifest(
        2, 9, tracks={"model": track(tensor("a"), tensor("b", file="x.safetensors")), "draft": track(tensor())}
    ).encoded,
]


def resealed(rng: random.Random) -> bytes:
    """A manifest whose own digest is right, whatever it says."""
    body = otherwise(json.loads(rng.choice(MANIFESTS)), rng)
    if isinstance(body, dict):
        body.pop("manifest_digest", None)
        with suppress(ValueError, UnicodeEncodeError, OverflowError, msgspec.EncodeError):
            body["manifest_digest"] = sha256(canonical(body))
    return json.dumps(body).encode()


def read_manifest(data: bytes) -> None:
    with suppress(Corrupt):
        decode(data)


STORE = MemoryStore(published(1, 2))


def read_hint(data: bytes) -> None:
    STORE.files[HEAD] = data
    assert Channel.open(STORE).poll() == VersionId(1, 2)


HEADER = raw_shard(
    {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [2, 6]},
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
    },
    b"aabbbb",
)


def read_shard(data: bytes) -> None:
    reader = MemoryReader(data)
    with suppress(BadShard):
        header = read_header(reader)
        assert sum(each.spec.nbytes for each in header.tensors.values()) == len(data) - header.data_start
    assert sum(reader.asked) <= len(data)


INDEX = json.dumps({"metadata": {"total_size": 6}, "weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}).encode()


def read_weight_map(data: bytes) -> None:
    with suppress(BadShard):
        assert isinstance(read_index(data), dict)


BLOBS = [blob_of_mode(mode) for mode in range(7)]


def any_blob(rng: random.Random) -> bytes:
    mode = rng.randrange(7)
    return bytes([mode]) + damaged(BLOBS[mode][0], rng)


def read_blob(data: bytes) -> None:
    image = bytearray(BLOBS[data[0]][1])
    with suppress(BadShard):
        codec.apply(codec.parse(data[1:], 2, 2 * BLOCK), image)


ROWS = [codec.parse(blob, 2, 2 * BLOCK).rows[0] for blob, _ in BLOBS]
PAYLOADS = [blob[row.offset : row.offset + row.length] for row, (blob, _) in zip(ROWS, BLOBS, strict=True)]


def any_payload(rng: random.Random) -> bytes:
    mode = rng.randrange(7)
    return bytes([mode]) + damaged(PAYLOADS[mode], rng)


def read_payload(data: bytes) -> None:
    """One that was made up on purpose: its digests are right."""
    image = np.frombuffer(bytearray(BLOBS[data[0]][1]), dtype=np.uint16)[:BLOCK]
    with suppress(BadShard):
        modes.apply(data[0], memoryview(data[1:]), image, ROWS[data[0]].changed)


BODIES = [b'{"version": "e1-v2"}', b'{"version": 12}', b'{"version": "latest", "more": [1, {"a": null}]}']


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with closing(Sidecar(StandIn(READY, loads=never), Metrics(), ":0")) as made:
        yield made


def fuzz(make: Callable[[random.Random], bytes], read: Callable[[bytes], None]) -> None:
    rng = random.Random(SEED)
    tracemalloc.start()
    try:
        for number in range(CASES):
            data, begin = make(rng), time.thread_time()
            try:
                read(data)
            except Exception as error:
                raise AssertionError(f"case {number} of seed {SEED}: {data!r}") from error
            assert time.thread_time() - begin < SECONDS, f"case {number} of seed {SEED} took too long: {data!r}"
            if number == TRACED:
                assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
                tracemalloc.stop()
    finally:
        tracemalloc.stop()


KINDS: dict[str, tuple[Callable[[random.Random], bytes], Callable[[bytes], None]]] = {
    "manifest": (corpus(*MANIFESTS), read_manifest),
    "manifest with a right digest": (resealed, read_manifest),
    "head": (corpus(STORE.files[HEAD]), read_hint),
    "safetensors header": (corpus(HEADER), read_shard),
    "index": (corpus(INDEX), read_weight_map),
    "delta blob": (any_blob, read_blob),
    "delta payload with right digests": (any_payload, read_payload),
}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_bytes_are_a_typed_error_or_a_right_answer(kind: str) -> None:
    fuzz(*KINDS[kind])


def test_damaged_bodies_are_answered_by_the_sidecar(sidecar: Sidecar) -> None:
    def read(body: bytes) -> None:
        answer = sidecar.answer(Request(method="POST", target="/load", body=body))
        said = msgspec.json.decode(answer.body)
        assert answer.status == 200 or (400 <= answer.status < 500 and said["kind"] and said["message"])

    fuzz(corpus(*BODIES), read)


def test_damage_reaches_behind_the_digests() -> None:
    """Else the cases above would all be refused at the door."""
    rng, read = random.Random(SEED), 0
    for _ in range(500):
        with suppress(CkptSyncError):
            decode(resealed(rng))
            read += 1
    assert 10 < read < 490
