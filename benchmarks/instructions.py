"""Instructions that compiled code runs on the hot paths, counted by valgrind: the same however busy the machine is.

    python -m benchmarks.instructions [--record]        # a part of `make bench-smoke`; 1 to 2 min

Against benchmarks/results/instructions.json: it fails where a path runs 20 % more than there. Counts are those of the
libraries and the processor's features that they were recorded with; with others it says so, and compares nothing. Nor
does it without valgrind.
"""

from __future__ import annotations

import argparse
import gc
import glob
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ckptsync import digest
from ckptsync.delta import codec
from ckptsync.manifest import FileEntry, Manifest, TensorEntry, Track, combined_content, decode, seal

RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results", "instructions.json")
STEP = 1.2
LIBRARIES = ("llvmlite", "msgspec", "numba", "numpy", "xxhash", "zstandard")
MARK = "getpgrp"
"""A function of the C library that nothing else calls: callgrind writes down what it has counted when it is entered."""

Act = Callable[[], object]


def paths() -> dict[str, Act]:
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.02, 1 << 20).astype(np.float32).view(np.uint32) >> 16
    old = old.astype(np.uint16)
    new = old.copy()
    new[rng.choice(len(old), len(old) // 100, replace=False)] += 1
    before, after, image = old.data.cast("B"), new.data.cast("B"), old.copy()
    blob, block, manifest = codec.encode(before, after, 2), bytes(8 << 20), of_many_tensors(10_000)

    def apply(changes: Any = blob) -> None:
        np.copyto(image, old)
        codec.apply(codec.parse(changes, 2, len(old)), image.data.cast("B"))

    return {
        "delta, encode, fast": lambda: codec.encode(before, after, 2, effort="fast"),
        "delta, encode, best": lambda: codec.encode(before, after, 2),
        "delta, apply": apply,
        "digest": lambda: digest.digest(block),
        "parse": lambda: decode(manifest),
    }


def of_many_tensors(count: int) -> bytes:
    empty = "0" * 32
    rows = [TensorEntry(name=f"layers.{at}.w", dtype="U8", shape=(1,), digest=empty, file="a") for at in range(count)]
    tracks = {"model": Track(files=(FileEntry(name="a", size=count, digest=empty),), tensors=tuple(rows))}
    return seal(
        Manifest(
            channel_id="c", epoch=1, number=1, nonce="n", run_id="r", created=1.0, digest="xxh3-128", tracks=tracks,
            content_digest=combined_content(tracks),
        )
    )[1]  # fmt: skip


def run_marked() -> None:
    """Each path between two marks, after one that compiles and warms. Without the collector of garbage: it comes when
    others have left enough, and made `parse` a sixth dearer."""
    gc.disable()
    for act in paths().values():
        act()
        os.getpgrp()
        act()
        os.getpgrp()


def counted() -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        # Compiled for one kind of processor, whichever this is, and without valgrind, which takes four minutes for it.
        kind = {"NUMBA_CACHE_DIR": folder, "NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}
        command = [sys.executable, "-m", "benchmarks.instructions", "--marked"]
        subprocess.run(command, check=True, env=os.environ | kind)
        return dict(zip(paths(), between_marks(command, kind)[1::2], strict=True))


def between_marks(command: Sequence[str], environment: Mapping[str, str] = {}) -> list[int]:
    """Instructions up to each mark, from the one before."""
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--quiet", "--smc-check=all", f"--dump-before={MARK}"]
        subprocess.run(
            [*valgrind, f"--callgrind-out-file={folder}/out", *command],
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "0", **environment},
        )
        dumps = sorted(glob.glob(f"{folder}/out.*"), key=lambda path: int(path.rpartition(".")[2]))
        return [_total(path) for path in dumps]


def _total(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        found = re.search(r"^(?:totals|summary): (\d+)", file.read(), re.MULTILINE)
    return int(found[1]) if found else 0


def here() -> dict[str, str]:
    """What the counts depend on."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        avx2 = "avx2" in file.read().split()
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": "{}.{}".format(*sys.version_info), "avx2": str(avx2), **versions}


def compared(record: dict[str, Any]) -> list[str]:
    if record["with"] != here():
        other = {name: here()[name] for name, value in record["with"].items() if here().get(name) != value}
        print(f"instructions of compiled code: not compared, the record is of others than {other} (--record)")
        return []
    found = []
    for name, now in counted().items():
        before = record["paths"][name]
        print(f"{name}: {now:,} instructions, {before:,} in the record")
        if now > before * STEP:
            found.append(f"{name}: {now / before:.2f} times the instructions of before")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="what is found now is what later runs are held against")
    parser.add_argument("--marked", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.marked:
        run_marked()
    elif shutil.which("valgrind") is None:
        print("instructions of compiled code: not counted, there is no valgrind")
    elif args.record:
        with open(RECORD, "w", encoding="utf-8") as file:
            json.dump({"with": here(), "paths": counted()}, file, indent=1)
    else:
        with open(RECORD, encoding="utf-8") as file:
            found = compared(json.load(file))
        if found:
            sys.exit("more work than before (if it is meant: --record):\n  " + "\n  ".join(found))


if __name__ == "__main__":
    main()
