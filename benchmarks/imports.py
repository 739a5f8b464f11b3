"""How long `import ckptsync.channel, watchers.watcher` takes in a fresh process, over an empty Python start.

python -m benchmarks.imports [--runs 10]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from benchmarks.common import load

CORE = "import ckptsync.channel, watchers.watcher"


def seconds(code: str, runs: int) -> float:
    """Median wall seconds of a fresh interpreter that runs `code`."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def run(runs: int) -> dict[str, float]:
    """Seconds of an empty interpreter, and what the core's import adds to it."""
    seconds(CORE, 1)  # compiled, and in the page cache
    empty, core = seconds("pass", runs), seconds(CORE, runs)
    return {"empty": empty, "core": core - empty}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.runs)
    if options.json:
        json.dump({**found, "load": load()}, sys.stdout)
    else:
        print(f"core import: {found['core']:.3f} s over an empty interpreter's {found['empty']:.3f} s")


if __name__ == "__main__":
    main()
