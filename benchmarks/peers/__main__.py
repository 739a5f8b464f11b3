"""Every peer beside ckptsync, built and run on this machine with the same weights.

    python -m benchmarks peers [--size 0.5] [--rounds 3] [--root FOLDER] [--only TASK …] [--places PLACE …] [--readme]
    python -m benchmarks peers --page FILE …        # from what runs with --json printed, where one run was too long

Each way of a task runs once per round, in turning order; a figure is the median over the rounds of a peer's time
over ours in the same round. Results go to benchmarks/results/peers.json, docs/benchmarks.md and its plot (those of
2 GB to peers-2gb.json, benchmarks-2gb.md …); `--readme` puts the table into README.md. `--root` is a folder on the
disk to be measured, not tmpfs. What `benchmarks.gpu_peers` found on a GPU is put beside those of 0.5 GB. The peers that
pin packages of their own get an environment in ~/.cache/ckptsync, made at the first run (tests/envs/peers.txt).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers.utils import logging as transformers_logging

from benchmarks.common import load
from benchmarks.peers import deltas, live, loading, ranks, report, saving, ways
from benchmarks.peers.clock import Row
from benchmarks.peers.elsewhere import Elsewhere
from benchmarks.peers.weights import model_of
from ckptsync.store import direct

RESULTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "results")
SIZE = 0.5
"""GB of which the page and the README's table are; others get files and pages of their own."""
ALONE = {"publish": saving.run, "stage": loading.run, "live": live.run}
TASKS = (*ALONE, "ranks", "delta")
DELTA_SHARE = 0.25
"""Of the size: arc_v3 encodes 0.06 GB/s."""
HELD = {"publish": 2, "stage": 4, "live": 4, "ranks": 4, "delta": 2}
"""Times the size that is in memory at once: the weights and their copies, staged, loaded, gathered or on their way."""
STORED = {"publish": 1, "stage": 4, "live": 1}
"""The same of what lies in a store in memory."""


def measure(options: argparse.Namespace, left: dict[str, str]) -> list[Row]:
    """`left`: what memory does not allow is put down there."""
    size, rounds = options.size, options.rounds
    without, rows = frozenset(options.without), list[Row]()
    fits = partial(fits_of, size, available(), left)
    with ways.local("disk", options.root, without) as disk:
        if alone := [name for name in ALONE if name in options.only]:
            with ways.local("/dev/shm", "/dev/shm", without) as memory, ways.s3(options.root, without) as bucket:
                places = [place for place in (disk, memory, bucket) if place.name in options.places]
                pairs = [(name, place) for name in alone for place in places if fits(name, place.name)]
                rows += in_one_process(size, pairs, rounds)
        if "ranks" in options.only and fits("ranks", "disk"):
            rows += told("ranks", partial(ranks.run, size, disk, rounds))
        if "delta" in options.only and fits("delta", "disk"):
            rows += told("delta", partial(deltas.run, size * DELTA_SHARE, disk, rounds))
    return rows


def fits_of(size: float, there: float, left: dict[str, str], task: str, place: str) -> bool:
    needed = size * (HELD[task] + (STORED.get(task, 0) if place == "/dev/shm" else 0))
    if needed > there:
        left[f"{task}, {place}"] = f"it takes {needed:.0f} GB of memory at once, and {there:.0f} GB were available"
    return needed <= there


def available() -> float:
    """GB of memory."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 / 1e9 for line in file if line.startswith("MemAvailable"))


def in_one_process(size: float, pairs: list[tuple[str, ways.Place]], rounds: int) -> list[Row]:
    rows: list[Row] = []
    if pairs:
        model = model_of(size)
    for name, place in pairs:
        rows += told(f"{name}, {place.name}", partial(ALONE[name], model, place, rounds))
    return rows


def told(what: str, work: Callable[[], list[Row]]) -> list[Row]:
    start = time.monotonic()
    rows = work()
    print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return rows


def absent() -> dict[str, str]:
    """Peers that do not run on this machine, in their own words."""
    with Elsewhere() as guest:
        why = guest.cannot("checkpoint_engine")
    return {"checkpoint-engine": why} if why else {}


def chosen(options: argparse.Namespace) -> list[str]:
    """The options that make it less than the whole table."""
    parts = {
        "--only": (options.only, TASKS),
        "--places": (options.places, report.PLACES),
        "--without": (options.without, ()),
    }
    return [word for name, (some, every) in parts.items() if set(some) != set(every) for word in (name, *some)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=SIZE, help="GB of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", default=os.getcwd(), help="a folder on the disk to be measured; not tmpfs")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument(
        "--places", nargs="+", choices=report.PLACES, default=report.PLACES, help="of what one process does"
    )
    parser.add_argument("--without", nargs="+", default=[], metavar="WAY", help="such as what memory does not allow")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    parser.add_argument("--json", action="store_true", help="print what was found, and write nothing")
    parser.add_argument("--page", nargs="+", metavar="FILE", help="run nothing: write the page of what these hold")
    options = parser.parse_args(arguments)
    try:
        if not options.page:
            check(options)
        parts = report.joined(options.page) if options.page else None
    except ValueError as error:
        parser.error(str(error))
    found = parts or run(options)
    if options.json:
        print(json.dumps(found))
        return
    report.show(found)
    if not (report.whole(found) or (options.page and found["size"] != SIZE)):
        print("a part of the table: no page is written; put parts together with `--json` and `--page`", file=sys.stderr)
        return
    suffix = "" if found["size"] == SIZE else f"-{found['size']:g}gb"
    with open(os.path.join(RESULTS, f"peers{suffix}.json"), "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
    report.write(found, suffix, readme=options.readme)


def check(options: argparse.Namespace) -> None:
    """ValueError for what nothing can be measured with."""
    if not 0 < options.size < math.inf:
        raise ValueError(f"--size is in GB and above 0, not {options.size}")
    if options.rounds < 1:
        raise ValueError(f"--rounds is 1 at least, not {options.rounds}")
    if not os.path.isdir(options.root):
        raise ValueError(f"--root {options.root} is not a folder")
    handle = os.open(options.root, os.O_RDONLY)
    in_memory = direct.in_memory(handle)
    os.close(handle)
    if in_memory:
        raise ValueError(f"--root {options.root} is in memory (tmpfs): name a folder on the disk to be measured")


def run(options: argparse.Namespace) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `timeout` too leaves no servers and no gigabytes behind
    transformers_logging.disable_progress_bar()
    words = f"python -m benchmarks peers --size {options.size:g} --rounds {options.rounds}".split()
    parts, before = chosen(options), load()
    left = dict.fromkeys(options.without, "left out by `--without`")
    rows = measure(options, left)
    return {
        "size": options.size,
        "rounds": options.rounds,
        "runs": [{"command": shlex.join([*words, *parts]), "before": before, "after": load()}],
        "absent": absent() | left,
        "rows": [each.to_json() for each in rows],
    }


if __name__ == "__main__":
    main()
