"""The guard against hot paths that grow: what it counts, and that it sees a step whatever else runs."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from benchmarks import smoke
from benchmarks.smoke import Path, counted, ratio
from ckptsync.digest import digest
from ckptsync.store.base import put_bytes, read_bytes
from ckptsync.testing import CountingStore, MemoryStore


def work(times: int) -> int:
    return sum(sum(range(20_000)) for _ in range(times))


def test_half_as_much_work_again_is_a_step():
    assert ratio(Path(lambda: work(15), lambda: work(10)), smoke.STEP, tries=3) > smoke.STEP


def test_more_turns_of_a_loop_without_calls_are_more_instructions():
    def encode(times: int) -> Path:
        name = compile(f"def turns():\n    for _ in range({times}): pass", smoke.OURS[0] + "/loop.py", "exec")
        made: dict[str, smoke.Act] = {}
        exec(name, made)
        return Path(made["turns"], made["turns"])

    once, more = counted(encode(1_000)), counted(encode(1_300))
    assert once["calls"] == more["calls"]
    assert more["instructions"] > once["instructions"] * smoke.STEP


def test_the_same_work_is_none():
    assert ratio(Path(lambda: work(10), lambda: work(10)), smoke.STEP) <= smoke.STEP


def test_it_counts_calls_requests_bytes_and_what_is_digested():
    store = CountingStore(MemoryStore())

    def act() -> None:
        put_bytes(store, "data/x", bytes(100))
        digest(read_bytes(store, "data/x", 1000))

    found = counted(Path(act, act, store))
    assert (found["requests"], found["bytes"], found["digested"]) == (2, 200, 100)
    assert found["calls"] > 10
    assert counted(Path(act, act, store)) == found, "they are exact"


def test_a_path_that_does_more_than_the_record_is_named(monkeypatch, capsys):
    record = {"machine": smoke.machine(), "python": smoke.python(), "paths": {"digest": counted_digest(1)}}
    record["paths"]["digest"]["ratio"] = 1.0
    monkeypatch.setattr(smoke, "paths", lambda: Found(3))
    assert any("digested 1,000 before, 3,000 now" in line for line in smoke.worse(record))
    monkeypatch.setattr(smoke, "paths", lambda: Found(1))
    assert [line for line in smoke.worse(record) if "CPU" not in line] == []


def counted_digest(times: int) -> dict[str, float]:
    return dict(counted(Found(times).path))


class Found:
    """The one path of a digest that is made several times."""

    def __init__(self, times: int) -> None:
        def act() -> None:
            for _ in range(times):
                digest(bytes(1000))

        self.path = Path(act, act)

    def __enter__(self) -> dict[str, Path]:
        return {"digest": self.path}

    def __exit__(self, *_: object) -> None: ...


def test_the_record_has_every_path():
    with open(smoke.RECORD, encoding="utf-8") as file:
        record = json.load(file)
    with smoke.paths() as paths:
        assert record["paths"].keys() == paths.keys()
