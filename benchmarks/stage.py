"""Stage and verify against plain O_DIRECT reads of the same bytes, paired in one run.

    python -m benchmarks.stage [--gb 2] [--stage /dev/shm] [--root FOLDER] [--pairs 5]

Each pair reads the published files once with four threads of 16 MiB O_DIRECT reads into one reused buffer
each, and stages them once (reading, digesting, writing the stage). The order within a pair alternates.
Reported: the median of the pairs' ratios plain / stage of wall time, and CPU seconds per GB.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from ckptsync.manifest import Manifest, TensorSpec
from tests.watcher.publish import TestPublisher
from watchers.stage import Stage

CHUNK, IN_FLIGHT = 16 << 20, 4
"""Of the plain reads."""


def published(root: str, gb: float) -> tuple[TestPublisher, Manifest]:
    """A version of `gb` GB in shards of 500 MB, in layers of 25 MB."""
    layer = TensorSpec("", "U8", (25_000_000,))
    specs = [TensorSpec(f"layers.{i}.weight", layer.dtype, layer.shape) for i in range(round(gb * 40))]
    publisher = TestPublisher(root)
    return publisher, publisher.publish(specs=specs, max_bytes=500_000_000)


def plain_reads(paths: list[str]) -> None:
    jobs = [(p, o) for p in paths for o in range(0, os.path.getsize(p), CHUNK)]
    handles = {p: os.open(p, os.O_RDONLY | os.O_DIRECT) for p in paths}
    buffers = [mmap.mmap(-1, CHUNK) for _ in range(IN_FLIGHT)]

    def read(worker: int) -> None:
        for path, offset in jobs[worker::IN_FLIGHT]:
            os.preadv(handles[path], [buffers[worker]], offset)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(read, range(IN_FLIGHT)))
    for handle in handles.values():
        os.close(handle)


def measured(work: object, *args: object) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work(*args)  # type: ignore[operator]
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--stage", default="/dev/shm")
    parser.add_argument("--root", default=None, help="where to publish; a folder on the disk to be read")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    root, stage = tempfile.mkdtemp(dir=options.root), tempfile.mkdtemp(dir=options.stage)
    try:
        compare(root, stage, options.gb, options.pairs)
    finally:
        shutil.rmtree(root)
        shutil.rmtree(stage)


def compare(root: str, stage: str, gb: float, pairs: int) -> None:
    publisher, manifest = published(root, gb)
    paths = [os.path.join(root, manifest.folder, name) for name, _ in manifest.files()]
    shards = [path for path in paths if path.endswith(".safetensors")]
    size = manifest.nbytes / 1e9

    def staged() -> None:
        cache = Stage(stage)
        cache.stage(publisher.channel, manifest)
        cache.close()

    rows = []
    for pair in range(pairs):
        shutil.rmtree(os.path.join(stage, manifest.channel_id), ignore_errors=True)
        works = [(plain_reads, shards), (staged,)] if pair % 2 == 0 else [(staged,), (plain_reads, shards)]
        results = {work[0].__name__: measured(*work) for work in works}
        rows.append((results["plain_reads"], results["staged"]))
    for plain, ours in rows:
        print(
            f"plain {plain[0]:.3f} s {plain[1] / size:.3f} cpu-s/GB   "
            f"stage {ours[0]:.3f} s {ours[1] / size:.3f} cpu-s/GB   ratio {plain[0] / ours[0]:.2f}"
        )
    ratio = statistics.median(plain[0] / ours[0] for plain, ours in rows)
    cpu = [statistics.median(row[side][1] for row in rows) / size for side in (0, 1)]
    print(
        f"{size:.2f} GB: stage reaches {ratio:.2f} of plain O_DIRECT reads, "
        f"at {cpu[1]:.2f} cpu-s/GB (plain: {cpu[0]:.2f}); load average {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
