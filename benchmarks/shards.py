"""Shards against plain O_DIRECT I/O of the same bytes, and against safetensors' own functions.

    python -m benchmarks.shards [--gb 2] [--root FOLDER] [--rounds 5] [--json]

Every round runs each contender once, in turning order, so a slow minute of the disk meets all of them.
`ratio` is the median over the rounds of the plain time divided by the contender's: 0.9 means nine tenths of
the plain speed.

- write: plain `pwrite`s of 16 MiB from page-aligned memory and fsync; the same through one aligned
  buffer, which any writer of ordinary tensors needs, since torch aligns them to 64 bytes; ShardWriter into a
  LocalStore (digests of file and tensors, fsync of file and folder, rename); `save_file` and fsync.
- read: plain reads, four threads, each into one buffer that is used again; `load_tensors` with and without
  `verify` into fresh memory; `load_file` (cold cache) and one touch of every page, without a digest.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.common import Row, compare, load
from ckptsync.manifest import Track
from ckptsync.shards.plan import plan_shards
from ckptsync.shards.tensors import load_tensors, spec_of, tensor_bytes
from ckptsync.shards.write import ShardWriter
from ckptsync.store.local import LocalStore

CHUNK = 16 << 20
THREADS = 4
TENSORS = 32


class Shards:
    """`gb` GB of BF16 in page-aligned memory, and the files written from it."""

    def __init__(self, root: str, gb: float) -> None:
        elements = round(gb * 1e9 / 2 / TENSORS / 2048) * 2048
        self.memory = mmap.mmap(-1, elements * 2 * TENSORS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(self.memory, dtype=torch.bfloat16)
        for part in flat.split(1 << 24):
            part.normal_()
        self.state = {f"layers.{i}.weight": part for i, part in enumerate(flat.split(elements))}
        self.root, self.gb = root, len(self.memory) / 1e9
        self.plan = plan_shards([spec_of(name, part) for name, part in self.state.items()])[0]
        self.track = Track(files=(), tensors=())

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def write_plain(self, bounce: memoryview | None = None) -> None:
        fd = os.open(self.path("plain"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        memory = memoryview(self.memory)
        for start in range(0, len(memory), CHUNK):
            part = memory[start : start + CHUNK]
            if bounce:
                bounce[: len(part)], part = part, bounce[: len(part)]
            os.pwrite(fd, part, start)
        os.fsync(fd)
        os.close(fd)

    def write_shard(self) -> None:
        writer = ShardWriter(LocalStore(self.root).write(self.plan.file), self.plan)
        for spec in self.plan.tensors:
            writer.add(spec.name, tensor_bytes(self.state[spec.name]))
        file, entries = writer.finish()
        self.track = Track(files=(file,), tensors=entries)

    def write_safetensors(self) -> None:
        save_file(self.state, self.path("theirs"))
        fd = os.open(self.path("theirs"), os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def read_plain(self) -> None:
        fd = os.open(self.path(self.plan.file), os.O_RDONLY | os.O_DIRECT)
        size, buffers = os.fstat(fd).st_size, [mmap.mmap(-1, CHUNK) for _ in range(THREADS)]

        def read(worker: int) -> None:
            for start in range(worker * CHUNK, size, THREADS * CHUNK):
                os.preadv(fd, [buffers[worker]], start)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(read, range(THREADS)))
        os.close(fd)

    def read_shard(self, verify: bool) -> None:
        for _ in load_tensors(self.root, self.track, verify=verify):
            pass

    def read_safetensors(self) -> None:
        for part in load_file(self.path("theirs")).values():
            part.view(torch.uint8)[:: mmap.PAGESIZE].sum()

    def drop(self, *names: str) -> None:
        """Out of the way, uncounted: no old file to truncate, none in the page cache."""
        for name in names:
            if os.path.exists(self.path(name)):
                os.unlink(self.path(name))

    def cool(self) -> None:
        fd = os.open(self.path("theirs"), os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def run(root: str, gb: float, rounds: int) -> list[Row]:
    shards = Shards(root, gb)
    writes = {
        "plain O_DIRECT": shards.write_plain,
        "plain, through a buffer": lambda: shards.write_plain(memoryview(mmap.mmap(-1, CHUNK))),
        "ShardWriter": shards.write_shard,
        "save_file + fsync": shards.write_safetensors,
    }
    written = compare("write", shards.gb, rounds, writes, lambda: shards.drop("plain", shards.plan.file, "theirs"))
    shards.write_shard()
    shards.write_safetensors()
    reads = {
        "plain O_DIRECT": shards.read_plain,
        "load_tensors, verified": lambda: shards.read_shard(True),
        "load_tensors": lambda: shards.read_shard(False),
        "load_file, touched": shards.read_safetensors,
    }
    return written + compare("read", shards.gb, rounds, reads, shards.cool)


def table(rows: list[Row]) -> Table:
    out = Table("task", "contender", title="shards")
    for heading in ("GB/s", "of plain", "cpu s/GB"):
        out.add_column(heading, justify="right")
    for row in rows:
        out.add_row(row.task, row.contender, f"{row.gb_per_s:.2f}", f"{row.ratio:.2f}", f"{row.cpu_s_per_gb:.3f}")
    return out


def command(description: str | None, measure: Callable[[str, float, int], list[Row]]) -> None:
    """The command line of a benchmark whose rows are contenders on one disk."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--root", help="a folder on the disk to be measured; not tmpfs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.root) as root:
        rows = measure(root, options.gb, options.rounds)
    if options.json:
        json.dump({"rows": [asdict(row) for row in rows], "load": load()}, sys.stdout)
    else:
        Console().print(table(rows), load())


def main() -> None:
    command(__doc__, run)


if __name__ == "__main__":
    main()
