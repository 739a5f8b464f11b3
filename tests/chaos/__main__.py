"""`python -m tests.chaos`, or `make chaos`: one run, its laws, a report, a picture and a table.

Ends with 1 if a law was broken. `--replay report.json` runs a recorded schedule again, `--judge report.json` looks at a
recorded run again without running anything.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile

from . import record, timeline
from .laws import judge
from .run import run
from .table import table


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    os.makedirs(options.out, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the world is taken down
    report = record.load(options.judge) if options.judge else _run(options)
    record.save(report, f"{options.out}/report.json")
    timeline.draw(report, f"{options.out}/timeline.png")
    verdict = judge(report)
    print(table(report, verdict))
    print(f"\n{options.out}/report.json, {options.out}/timeline.png")
    return int(any(verdict.values()))


def _run(options: argparse.Namespace) -> record.Report:
    seed, seconds, engine, schedule = options.seed, options.seconds, options.engine, None
    if options.replay:
        before = record.load(options.replay)
        seed, seconds, engine, schedule = before.seed, before.seconds, before.engine, before.schedule
    folder = tempfile.mkdtemp(prefix="ckptsync-chaos-")
    try:
        return run(folder, seed, seconds, engine, schedule)
    finally:
        shutil.copytree(f"{folder}/logs", f"{options.out}/logs", dirs_exist_ok=True)
        shutil.rmtree(folder)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="of faults; the start and the end come on top")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same faults")
    parser.add_argument(
        "--engine", choices=["module", "sglang"], default="module", help="what runs beside module engines"
    )
    parser.add_argument("--out", default="chaos", help="a folder for report.json, timeline.png and logs/")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--replay", metavar="REPORT", help="run the schedule of this report, with its seed and engine")
    again.add_argument("--judge", metavar="REPORT", help="look at a recorded run again")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
