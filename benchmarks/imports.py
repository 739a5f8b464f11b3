"""How long `import ckptsync.channel, watchers.watcher` takes in a fresh process, over an empty Python start.

python -m benchmarks.imports [--runs 10]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

CORE = "import ckptsync.channel, watchers.watcher"


def seconds(code: str, runs: int) -> float:
    """Median wall seconds of a fresh interpreter that runs `code`."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    seconds(CORE, 1)  # compiled, and in the page cache
    empty, core = seconds("pass", runs), seconds(CORE, runs)
    print(f"core import: {core - empty:.3f} s over an empty interpreter's {empty:.3f} s (median of {runs})")


if __name__ == "__main__":
    main()
