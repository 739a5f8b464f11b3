"""Does a hot path do more than it did? Never asked of the clock: `make bench-smoke`.

    python -m benchmarks.smoke [--record]

Two kinds of numbers, against benchmarks/results/smoke.json:

- counts, which are exact however busy the machine is: instructions of Python that functions of ours run, and their
  calls; requests to the store, bytes that go to it and come from it, bytes that are digested. The first two are
  compared on the Python that they were recorded with. It fails if one is 20 % above the record.
- a ratio: CPU time over that of a fixed work of the same kind in the same run, the least of many short ones in turns,
  since what else runs on a machine only ever adds. It is there for what compiled code does, and fails at twice the
  record: a neighbour on the same core, and another processor, move ratios of unlike work by half (a quiet machine and
  a shared one gave 0.10 and 0.13 for the parser). Where one looks too large it is measured again, up to `TRIES` times.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import xxhash

from benchmarks.delta import synthetic
from benchmarks.instructions import of_many_tensors
from ckptsync import Publisher, digest
from ckptsync.channel import Channel
from ckptsync.delta import codec
from ckptsync.manifest import decode
from ckptsync.testing import CountingStore, Counts, MemoryStore
from watchers.stage import Stage

RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "smoke.json")
STEP, RATIO_STEP = 1.2, 2.0
ROUNDS, TRIES = 8, 8
OF_PYTHON = ("calls", "instructions")
OURS = tuple(os.path.join(os.path.dirname(RECORD), "..", "..", name) for name in ("ckptsync", "watchers"))

Act = Callable[[], object]


class Path(NamedTuple):
    """Something that is done often, and the work that it is held against."""

    act: Act
    like: Act
    store: CountingStore | None = None


@dataclass(slots=True)
class Digested:
    """Bytes that went through the default digest."""

    nbytes: int = 0

    def hasher(self) -> Any:
        inner = xxhash.xxh3_128()

        def update(data: Any) -> None:
            self.nbytes += memoryview(data).nbytes
            inner.update(data)

        return mock.Mock(spec=["update", "hexdigest"], update=update, hexdigest=inner.hexdigest)


# -- what is done ----------------------------------------------------------------------------------------------


@contextmanager
def paths() -> Iterator[dict[str, Path]]:
    old, new = synthetic(1 << 20, 0.01)
    blob = codec.encode(old.data.cast("B"), new.data.cast("B"), 2)
    block, copy = os.urandom(8 << 20), np.empty(1 << 20, dtype=np.uint16)
    manifest, store, still = of_many_tensors(10_000), CountingStore(MemoryStore()), CountingStore(MemoryStore())
    text = json.dumps([{"name": f"layers.{at}", "shape": [at]} for at in range(3_000)])
    model = {f"layers.{at}.weight": torch.zeros(1 << 14) for at in range(64)}
    with Publisher(store, shard_bytes=1 << 20) as publisher, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        publisher.publish(model)
        still.inner = MemoryStore(store.inner.files)  # of one version for ever, however often that path is taken
        channel = Channel.open(still)
        channel.poll()
        yield {
            "publish": Path(lambda: publisher.publish(model), again(12, lambda: json.loads(text)), store),
            "poll": Path(lambda: [channel.poll() for _ in range(50)], lambda: json.loads(text), still),
            "stage": Path(lambda: staged(still, folder), again(10, lambda: json.loads(text)), still),
            "parse": Path(lambda: decode(manifest), again(25, lambda: json.loads(text))),
            "digest": Path(lambda: digest.digest(block), lambda: xxhash.xxh3_128(block).hexdigest()),
            "delta, encode": Path(
                lambda: codec.encode(old.data.cast("B"), new.data.cast("B"), 2), again(14, lambda: compared(old, new))
            ),
            "delta, apply": Path(lambda: applied(blob, old, copy), again(6, lambda: compared(old, new))),
        }


def again(times: int, act: Act) -> Act:
    """About as long as what is held against it: a shorter one would find a quiet moment sooner on a busy machine."""
    return lambda: [act() for _ in range(times)]


def compared(old: np.ndarray, new: np.ndarray) -> int:
    return int(np.count_nonzero(old != new))


def applied(blob: bytes | None, old: np.ndarray, copy: np.ndarray) -> None:
    assert blob is not None
    np.copyto(copy, old)
    codec.apply(codec.parse(blob, 2, len(old)), copy.data.cast("B"))


def staged(store: CountingStore, folder: str) -> None:
    channel = Channel.open(store)
    with tempfile.TemporaryDirectory(dir=folder) as mine:
        stage = Stage(mine)
        stage.stage(channel, channel.latest())
        stage.close()


# -- counting --------------------------------------------------------------------------------------------------


def counted(path: Path) -> dict[str, int]:
    """Of one call, after one that warms whatever is made once."""
    path.act()
    calls, instructions, digested = 0, 0, Digested()

    def instruction(_frame: FrameType, event: str, _: object) -> Any:
        nonlocal instructions
        instructions += event == "opcode"
        return instruction

    def call(frame: FrameType, _event: str, _: object) -> Any:
        nonlocal calls
        if not ours(frame.f_code.co_filename):
            return None
        calls += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return instruction

    before = Counts() if path.store is None else path.store.counts - Counts()
    with mock.patch.dict(digest._ALGORITHMS, {digest.DEFAULT: digested.hasher}), traced(call):
        path.act()
    asked = Counts() if path.store is None else path.store.counts - before
    return {
        "calls": calls,
        "instructions": instructions,
        "requests": asked.requests,
        "bytes": asked.read + asked.written,
        "digested": digested.nbytes,
    }


@contextmanager
def traced(call: Any) -> Iterator[None]:
    """With `call` as the tracer of every thread; what traced before, as a measure of coverage does, goes on after."""
    before = sys.gettrace()
    threading.settrace(call)
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]


@functools.cache
def ours(file: str) -> bool:
    return os.path.normpath(file).startswith(HOMES)


HOMES = tuple(os.path.normpath(home) for home in OURS)


def ratio(path: Path, limit: float, tries: int = TRIES) -> float:
    """Least CPU time of the path over that of what it is held against; measured on while it is above `limit`."""
    ours, theirs = math.inf, math.inf
    for _ in range(tries):
        for _ in range(ROUNDS):
            ours, theirs = min(ours, cpu(path.act)), min(theirs, cpu(path.like))
        if ours / theirs <= limit:
            break
    return ours / theirs


def cpu(act: Act) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


# -- against the record ----------------------------------------------------------------------------------------


def machine() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())


def python() -> str:
    return "{}.{}".format(*sys.version_info)


def worse(record: dict[str, Any]) -> list[str]:
    """What is above the record, in words."""
    found = []
    with paths() as all_paths:
        counts = {name: counted(path) for name, path in all_paths.items()}
        for name, path in all_paths.items():
            before = record["paths"][name]
            for what, count in counts[name].items():
                if count > before[what] * STEP and (what not in OF_PYTHON or record["python"] == python()):
                    found.append(f"{name}: {what} {before[what]:,} before, {count:,} now")
            limit = before["ratio"] * RATIO_STEP
            if (now := ratio(path, limit)) > limit:
                found.append(f"{name}: {now / before['ratio']:.2f} times the CPU time of before")
            print(f"{name}: {now:.3g} of its yardstick, {before['ratio']:.3g} in the record")
    return found


def recorded() -> dict[str, Any]:
    with paths() as all_paths:
        counts = {name: counted(path) for name, path in all_paths.items()}
        rows = {name: {**counts[name], "ratio": round(ratio(path, 0.0, 2), 4)} for name, path in all_paths.items()}
    return {"machine": machine(), "python": python(), "paths": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="what is found now is what later runs are held against")
    if parser.parse_args().record:
        new = recorded()
        with open(RECORD, "w", encoding="utf-8") as file:
            json.dump(new, file, indent=1)
        return
    with open(RECORD, encoding="utf-8") as file:
        found = worse(json.load(file))
    if found:
        sys.exit("more work than before (if it is meant: --record):\n  " + "\n  ".join(found))


if __name__ == "__main__":
    import logging

    logging.getLogger("ckptsync").setLevel(logging.ERROR)
    main()
