"""Every benchmark, one after the other, and the README's table from what they measured.

    python -m benchmarks [--gb 2] [--rounds 5] [--root FOLDER] [--readme]
    python -m benchmarks growth|scale
    python -m benchmarks peers [--size 0.5] [--readme]        # other people's tools beside it: benchmarks/peers

Each benchmark is a process of its own. Results go to benchmarks/results/latest.json, and those of `growth` (how cost
grows) and `scale` (a model of large fleets) to files and plots of their own; `--readme` puts the table into
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
ALONE = {"growth": "growth", "scale": "scale_model"}


def result_of(module: str, *arguments: str) -> Any:
    """What `python -m benchmarks.<module> ... --json` printed."""
    Console(stderr=True).print(f"benchmarks.{module} {' '.join(arguments)}")
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=os.path.join(HERE, "..")).stdout)


def of_plain(rows: list[dict[str, Any]], contender: str, what: str, against: str, cpu_target: str = "") -> list[Line]:
    """Wall time as a share of the plain calls', and CPU where there is a target for it."""
    row = next(row for row in rows if row["contender"] == contender)
    speed = f"{row['ratio']:.2f} of its speed ({row['gb_per_s']:.2f} GB/s)"
    lines = [Line(what, contender, against, speed, ">= 0.95")]
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


def of_delta(found: dict[str, Any]) -> list[Line]:
    rows = {row["encoding"]: row for row in found["rows"] if row["update"] == "synthetic, 1.0%"}
    xor, memcpy = rows["XOR, zstd-1 (slime, miles, SkyRL, stitch)"], found["yardsticks"]["memcpy"]
    targets = {"fast": (">= 150 times smaller", 2, 5), "best": (">= 195 times smaller", 0.8, 1.5)}
    lines = []
    for effort, (size, encode, apply) in targets.items():
        row = rows[f"ckptsync-1, {effort}"]
        what = f"delta at 1 % changed bf16, {effort}"
        lines.append(
            Line(what, "ckptsync-1", f"XOR, zstd-1: {xor['ratio']:.0f}", f"{row['ratio']:.0f} times smaller", size)
        )
        speeds = f"{row['encode_gb_s']:.1f} and {row['apply_gb_s']:.1f} GB/s ({row['decode_gb_s']:.1f} proven)"
        lines.append(Line(f"{what}, encode and apply, one core", "ckptsync-1", f"memcpy: {memcpy:.1f} GB/s", speeds,
                          f">= {encode} and {apply} GB/s"))  # fmt: skip
    return lines


def keep(name: str) -> None:
    """Results of a benchmark that is no row of the table, and its plot in docs/."""
    found = result_of(ALONE[name])
    with open(os.path.join(HERE, "results", f"{name}.json"), "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)


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
        "delta": result_of("delta", "--rounds", str(rounds)),
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
        *of_delta(found["delta"]),
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
    parser.add_argument("only", nargs="?", choices=list(ALONE))
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", default=os.getcwd(), help="a folder on the disk to be measured; not tmpfs")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    if options.only:
        keep(options.only)
        return
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
    if sys.argv[1:2] == ["peers"]:
        from benchmarks.peers.__main__ import main as peers

        peers(sys.argv[2:])
    else:
        main()
