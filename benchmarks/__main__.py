"""Every benchmark, one after the other, and the README's table from what they measured.

    python -m benchmarks [--gb 2] [--rounds 5] [--root FOLDER] [--readme]

Each benchmark is a process of its own. Results go to benchmarks/results/latest.json; `--readme` puts the table into
README.md. `--root` is a folder on the disk to be measured, not tmpfs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import Line, load

HERE = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.path.join(HERE, "results", "latest.json")
README = os.path.join(HERE, "..", "README.md")


def result_of(module: str, *arguments: str) -> Any:
    """What `python -m benchmarks.<module> ... --json` printed."""
    Console(stderr=True).print(f"benchmarks.{module} {' '.join(arguments)}")
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=os.path.join(HERE, "..")).stdout)


def of_plain(rows: list[dict[str, Any]], contender: str, what: str, against: str, cpu_target: str = "") -> list[Line]:
    """Wall time as a share of the plain calls', and CPU where there is a target for it."""
    row = next(row for row in rows if row["contender"] == contender)
    speed = f"{row['ratio']:.2f} of its speed ({row['gb_per_s']:.2f} GB/s)"
    lines = [Line(what, contender, against, speed, ">= 0.9")]
    if cpu_target:
        lines.append(Line(f"{what}, CPU", contender, "", f"{row['cpu_s_per_gb']:.2f} s per GB", cpu_target))
    return lines


def of_s3(report: dict[str, Any]) -> list[Line]:
    lines = []
    for title, table in report.items():
        ours = {name: row for name, row in table.items() if name.startswith("ckptsync")}
        name, best = min(ours.items(), key=lambda item: item[1]["cpu ratio"])
        theirs = next(iter(table))
        lines.append(Line(f"{title}, client CPU", name, theirs, f"{best['cpu ratio']:.2f} of its CPU", "<= 1.1"))
        if "cpu ratio to obstore" in best:
            ratio = best["cpu ratio to obstore"]
            lines.append(Line(f"{title}, client CPU", name, "bare obstore", f"{ratio:.2f} of its CPU", "<= 1"))
    return lines


def of_watcher(found: dict[str, float]) -> list[Line]:
    def milliseconds(name: str) -> str:
        return f"{found[name] * 1e3:.0f} ms (worst {found[name + '_worst'] * 1e3:.0f})"

    return [
        Line("watcher idle, 1 s poll, 1,000 versions", "watch", "", f"{found['idle']:.2%} of a core", "< 1 %"),
        Line("publish to discovered, inotify", "watch", "", milliseconds("inotify"), "< 100 ms"),
        Line("publish to discovered, polling at 1 s", "watch", "", milliseconds("polling"), "< 2 polls"),
    ]


def measure(gb: float, rounds: int, root: str) -> dict[str, Any]:
    disk = ["--gb", str(gb), "--rounds", str(rounds), "--root", root]
    return {
        "before": load(),
        "publish": result_of("publish", *disk),
        "stage": result_of("stage", *disk),
        "shards": result_of("shards", *disk),
        "s3": result_of("store_raw", "--skip-disk", "--rounds", str(rounds)),
        "watcher": result_of("watcher_idle"),
        "imports": result_of("imports"),
        "after": load(),
    }


def lines_of(found: dict[str, Any]) -> list[Line]:
    writes, reads = "plain O_DIRECT writes + fsync", "plain O_DIRECT reads, 4 threads"
    core = found["imports"]["core"]
    return [
        *of_plain(found["publish"]["rows"], "Publisher.publish", "publish to local disk", writes, "<= 0.5 s per GB"),
        *of_plain(found["stage"]["rows"], "Stage.stage", "stage + verify from local disk to /dev/shm", reads),
        *of_plain(found["shards"]["rows"], "load_tensors, verified", "load + verify into tensors", reads),
        *of_s3(found["s3"]),
        *of_watcher(found["watcher"]),
        Line("import of the core", "ckptsync", "an empty interpreter", f"+{core:.2f} s", "< 0.5 s"),
    ]


def markdown(lines: list[Line], machine: str) -> str:
    head = ["| what | ours | measured against | result | target |", "|---|---|---|---|---|"]
    body = [f"| {line.what} | {line.ours} | {line.against} | {line.result} | {line.target} |" for line in lines]
    return "\n".join([*head, *body, "", f"Medians; {machine}."])


def write_readme(text: str) -> None:
    with open(README, encoding="utf-8") as file:
        old = file.read()
    begin, end = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
    new = re.sub(f"{begin}.*{end}", f"{begin}\n{text}\n{end}", old, flags=re.DOTALL)
    with open(README, "w", encoding="utf-8") as file:
        file.write(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", default=os.getcwd(), help="a folder on the disk to be measured; not tmpfs")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    found = measure(options.gb, options.rounds, options.root)
    lines = lines_of(found)
    os.makedirs(os.path.dirname(RESULTS), exist_ok=True)
    with open(RESULTS, "w", encoding="utf-8") as file:
        json.dump({**found, "table": [asdict(line) for line in lines]}, file, indent=1)
    table = Table("what", "ours", "against", "result", "target")
    for line in lines:
        table.add_row(line.what, line.ours, line.against, line.result, line.target)
    Console().print(table, f"load average before {found['before']}, after {found['after']}")
    if options.readme:
        write_readme(markdown(lines, f"{options.gb:g} GB, {options.rounds} rounds, {found['before']} at the start"))


if __name__ == "__main__":
    main()
