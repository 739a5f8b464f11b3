"""Stage and verify against plain O_DIRECT reads of the same bytes, paired in one run.

    python -m benchmarks.stage [--gb 2] [--root FOLDER] [--rounds 5] [--json]

Each round reads the published files once with four threads of 16 MiB O_DIRECT reads into one reused buffer
each, and stages them once in /dev/shm (reading, digesting, writing the stage), in turning order.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.common import Row, compare
from benchmarks.shards import command
from ckptsync.manifest import Manifest, TensorSpec
from tests.watcher.publish import TestPublisher
from watchers.stage import Stage

CHUNK, IN_FLIGHT = 16 << 20, 4
"""Of the plain reads."""

STAGE = "/dev/shm"


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


def run(root: str, gb: float, rounds: int) -> list[Row]:
    publisher, manifest = published(root, gb)
    paths = [os.path.join(root, manifest.folder, name) for name, _ in manifest.files()]
    shards = [path for path in paths if path.endswith(".safetensors")]
    with tempfile.TemporaryDirectory(dir=STAGE) as stage:

        def staged() -> None:
            cache = Stage(stage)
            cache.stage(publisher.channel, manifest)
            cache.close()

        contenders = {"plain O_DIRECT": lambda: plain_reads(shards), "Stage.stage": staged}
        empty = os.path.join(stage, manifest.channel_id)
        clear = partial(shutil.rmtree, empty, ignore_errors=True)
        return compare("stage", manifest.nbytes / 1e9, rounds, contenders, clear)


def main() -> None:
    command(__doc__, run)


if __name__ == "__main__":
    main()
