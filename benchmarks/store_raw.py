"""What our stores cost next to the bare tools, in pairs within one run.

    python benchmarks/store_raw.py --dir /mnt/disk --gb 2 --rounds 3
    python benchmarks/store_raw.py --skip-disk --s3-mb 512

Disk: LocalStore against a plain loop of O_DIRECT calls over the same bytes with fsync, and against `dd`. S3
(a SeaweedFS process on this machine, plain HTTP): client CPU against bare s3fs and obstore; wall times there
are the server's. Disks and neighbours are noisy, so each round runs all candidates one after the other, in
turning order, and the ratios are medians over the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from ckptsync.store import LocalStore, direct
from ckptsync.store.s3 import S3Store
from tests.servers import seaweed

CHUNK = 16 << 20
SOURCE = 256 << 20  # larger than the caches, so that copying it costs what it costs


class Run(NamedTuple):
    """Seconds of wall clock, and of this process's and its children's CPU."""

    wall: float
    cpu: float


Candidates = dict[str, Callable[[], None]]


def timed(call: Callable[[], None]) -> Run:
    cpu, wall = _cpu(), time.perf_counter()
    call()
    return Run(time.perf_counter() - wall, _cpu() - cpu)


def _cpu() -> float:
    """The S3 server is not in it: children count when they are waited for, and it outlives the runs."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def compare(candidates: Candidates, rounds: int, prepare: Callable[[], None] = lambda: None) -> dict[str, list[Run]]:
    """Every candidate once per round; each round begins with another one."""
    names = list(candidates)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            prepare()
            runs[name].append(timed(candidates[name]))
    return runs


# Disk


def source() -> memoryview:
    buffer = direct.aligned(SOURCE)
    for start in range(0, SOURCE, CHUNK):
        buffer[start : start + CHUNK] = os.urandom(CHUNK)
    return buffer


def chunks(data: memoryview, size: int):
    """`size` bytes of `data`, repeated, in chunks."""
    for start in range(0, size, CHUNK):
        yield data[start % SOURCE : start % SOURCE + min(CHUNK, size - start)]


def write_ours(folder: str, data: memoryview, size: int) -> None:
    writer = LocalStore(folder).write("ours.bin")
    for chunk in chunks(data, size):
        writer.write(chunk)
    writer.commit()


def write_plain(folder: str, data: memoryview, size: int) -> None:
    """The bare minimum: aligned source, no copy, no rename."""
    fd = os.open(f"{folder}/plain.bin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct.O_DIRECT, 0o644)
    for chunk in chunks(data, size):
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
    os.fsync(fd)
    os.close(fd)


def write_dd(folder: str, size: int) -> None:
    arguments = ["if=/dev/zero", f"of={folder}/dd.bin", "bs=16M", f"count={size // CHUNK}"]
    subprocess.run(["dd", *arguments, "oflag=direct", "conv=fsync", "status=none"], check=True)


def read_ours(folder: str, arena: memoryview, threads: int) -> None:
    reader = LocalStore(folder).open("ours.bin")
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: reader.readinto(at, arena[at : at + CHUNK]), range(0, reader.size, CHUNK)))
    reader.close()


def read_plain(folder: str, arena: memoryview, threads: int) -> None:
    fd = os.open(f"{folder}/ours.bin", os.O_RDONLY | direct.O_DIRECT)
    size = os.fstat(fd).st_size
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: os.preadv(fd, [arena[at : at + CHUNK]], at), range(0, size, CHUNK)))
    os.close(fd)


def disk(folder: str, size: int, rounds: int) -> dict[str, dict[str, list[Run]]]:
    data = source()

    def remove() -> None:
        for name in os.listdir(folder):
            os.unlink(f"{folder}/{name}")

    writers: Candidates = {
        "plain O_DIRECT": lambda: write_plain(folder, data, size),
        "ckptsync": lambda: write_ours(folder, data, size),
    }
    if shutil.which("dd"):
        writers["dd"] = lambda: write_dd(folder, size)
    results = {f"write {size / 1e9:.1f} GB to disk": compare(writers, rounds, remove)}
    write_ours(folder, data, size)
    arena = direct.aligned(size)
    arena[::4096] = bytes(len(arena[::4096]))  # so that the first candidate does not pay for the page faults
    readers: Candidates = {
        "plain O_DIRECT": lambda: read_plain(folder, arena, 4),
        "ckptsync": lambda: read_ours(folder, arena, 4),
    }
    results[f"read {size / 1e9:.1f} GB, 4 threads"] = compare(readers, rounds)
    return results


# S3


def put_ours(store: S3Store, path: str) -> None:
    writer = store.write("ours.bin")
    buffer = memoryview(bytearray(CHUNK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            writer.write(buffer[:count])
    writer.commit()


def get_ours(store: S3Store, path: str) -> None:
    reader = store.open("ours.bin")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def worker(number: int) -> None:
        buffer = direct.aligned(CHUNK)
        for at in range(number * CHUNK, reader.size, 4 * CHUNK):
            part = buffer[: reader.size - at]
            reader.readinto(at, part)
            os.pwrite(fd, part, at)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(worker, range(4)))
    os.close(fd)


def read_parallel(store: S3Store) -> None:
    """Into memory that is reused, as the stage does before it writes."""
    reader = store.open("ours.bin")

    def worker(number: int) -> None:
        buffer = direct.aligned(CHUNK)
        for at in range(number * CHUNK, reader.size, 4 * CHUNK):
            reader.readinto(at, buffer[: reader.size - at])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(worker, range(4)))


def s3(size: int, rounds: int) -> dict[str, dict[str, list[Run]]]:
    import s3fs

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        server = seaweed.start(folder)
        try:
            path, back = f"{memory}/file", f"{memory}/back"
            with open(path, "wb") as file:
                for _ in range(0, size, CHUNK):
                    file.write(os.urandom(CHUNK))
            url = f"s3://{server.bucket}/bench"
            store = S3Store(url, **server.options, obstore=False)
            bare = s3fs.S3FileSystem(**server.options, use_listings_cache=False, skip_instance_cache=True)
            where = f"{server.bucket}/bench/ours.bin"
            puts: Candidates = {
                "s3fs put_file": lambda: bare.put_file(path, where),
                "ckptsync, s3fs": lambda: put_ours(store, path),
            }
            gets: Candidates = {
                "s3fs get_file": lambda: bare.get_file(where, back),
                "ckptsync": lambda: get_ours(store, back),
            }
            starts = list(range(0, size, CHUNK))
            reads: Candidates = {
                "s3fs cat_ranges": lambda: bare.cat_ranges(
                    [where] * len(starts), starts, [start + CHUNK for start in starts], batch_size=4
                ),
                "ckptsync": lambda: read_parallel(store),
            }
            if importlib.util.find_spec("obstore"):
                fast = S3Store(url, **server.options, obstore=True)
                puts["ckptsync, obstore"] = lambda: put_ours(fast, path)
                _add_obstore(server, path, back, puts, gets, reads)
            return {
                f"put {size / 1e6:.0f} MB to S3": compare(puts, rounds),
                f"get {size / 1e6:.0f} MB from S3 into a file": compare(gets, rounds),
                f"get {size / 1e6:.0f} MB from S3 into memory": compare(reads, rounds),
            }
        finally:
            server.kill()


def _add_obstore(
    server: seaweed.S3Server, path: str, back: str, puts: Candidates, gets: Candidates, reads: Candidates
) -> None:
    import obstore
    from obstore.store import S3Store as ObstoreS3

    store = ObstoreS3(
        server.bucket, endpoint=server.endpoint, access_key_id=server.key, secret_access_key=server.secret,
        region="us-east-1", client_options={"allow_http": True}, virtual_hosted_style_request=False,
    )  # fmt: skip

    def put() -> None:
        with open(path, "rb") as file:
            obstore.put(store, "bench/ours.bin", file, chunk_size=CHUNK, max_concurrency=4)

    def get() -> None:
        with open(back, "wb", buffering=0) as file:
            for chunk in obstore.get(store, "bench/ours.bin").stream(min_chunk_size=CHUNK):
                file.write(chunk)

    def read(keep: bool) -> None:
        """Into obstore's own memory, or on into memory of ours, which only a copy can do."""

        def worker(number: int) -> None:
            buffer = direct.aligned(CHUNK)
            for at in range(number * CHUNK, os.path.getsize(path), 4 * CHUNK):
                data = obstore.get_range(store, "bench/ours.bin", start=at, length=CHUNK)
                if keep:
                    buffer[: len(data)] = memoryview(data)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(worker, range(4)))

    reads["obstore get_range"] = lambda: read(False)
    reads["obstore get_range, copied"] = lambda: read(True)
    puts["obstore put"] = put
    gets["obstore get"] = get


# Report


def summary(runs: dict[str, list[Run]], size: int) -> dict[str, dict[str, float]]:
    """Per candidate: best GB/s, least CPU seconds per GB, and the medians of the ratios to the first one, of CPU
    also to bare obstore where it runs."""
    first = next(iter(runs.values()))
    bare = next((own for name, own in runs.items() if name.startswith("obstore")), None)
    table = {}
    for name, own in runs.items():
        table[name] = {
            "GB/s": size / 1e9 / min(run.wall for run in own),
            "cpu-s/GB": min(run.cpu for run in own) / (size / 1e9),
            "speed ratio": statistics.median(b.wall / a.wall for a, b in zip(own, first, strict=True)),
            "cpu ratio": statistics.median(a.cpu / b.cpu for a, b in zip(own, first, strict=True)),
        }
        if bare is not None:
            table[name]["cpu ratio to obstore"] = statistics.median(
                a.cpu / b.cpu for a, b in zip(own, bare, strict=True)
            )
    return table


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    columns = ["best GB/s", "cpu-s/GB", "speed, x first", "CPU, x first", "CPU, x obstore"]
    grid = Table("candidate", *columns[: len(next(iter(table.values())))], title=title)
    for name, row in table.items():
        grid.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the disk to measure is")
    parser.add_argument("--gb", type=float, default=2.0, help="size of the file on disk")
    parser.add_argument("--s3-mb", type=int, default=256, help="size of the object on S3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-disk", action="store_true")
    parser.add_argument("--skip-s3", action="store_true")
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    given = parser.parse_args()
    report = {}
    if not given.skip_disk:
        size = int(given.gb * 1e9) // CHUNK * CHUNK
        with tempfile.TemporaryDirectory(dir=given.dir) as folder:
            report |= {title: summary(runs, size) for title, runs in disk(folder, size, given.rounds).items()}
    if not given.skip_s3:
        size = given.s3_mb * 1_000_000 // CHUNK * CHUNK
        report |= {title: summary(runs, size) for title, runs in s3(size, given.rounds).items()}
    if given.json:
        print(json.dumps(report, indent=2))
        return
    for title, table in report.items():
        show(title, table)


if __name__ == "__main__":
    main()
