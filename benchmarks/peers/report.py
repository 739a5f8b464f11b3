"""What was found, for people: a table on the terminal, docs/benchmarks.md with its plot, and the README's lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.ways import OURS

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
DOCS = os.path.join(ROOT, "docs")
README = os.path.join(ROOT, "README.md")
GPU = os.path.join(ROOT, "benchmarks", "results", "gpu-peers.json")
EVEN = 0.95
"""From this ratio of times on a peer is not ahead: rounds differ by more than that."""

LIVE = "it is called, not found, and reads what its save left in the page cache; nothing is digested, staged or proven"
WHY = {
    "bare": "the limit: it writes or reads the bytes and does nothing else",
    "safetensors load_file": "it maps the store's own pages; ours leaves a verified copy that outlives them",
    "safetensors save_file": "it digests nothing and leaves no commit",
    "transformers from_pretrained": "as load_file",
    "transformers save_pretrained": "as save_file",
    "runai-model-streamer": "it verifies nothing and keeps no copy on the host",
    "fastsafetensors": "it verifies nothing and keeps no copy on the host",
    "torch.load": "it verifies nothing, keeps no copy on the host, and what it reads must not come from strangers",
    "torch.save": "it digests nothing and leaves no commit, and what it writes must not be loaded from strangers",
    "save_file": LIVE,
    "save_pretrained": LIVE,
    "DCP": "every rank writes its own shards and nothing is gathered, so only DCP reads it; no digest",
    "slime": "it XORs and compresses, no more: about twice the bytes, and applied in place, so a failure leaves a mix",
    "Fireworks": "adler32 only, no commit, more bytes; what it writes of arc_v3 must not be loaded from strangers",
    "reload_weights": "it gathers and proves nothing beforehand: vLLM is paused for all of it, see its pause over ours",
    "checkpoint-engine": "vLLM is paused for longer; it proves nothing",
    "ckptsync": "another way of ours: no stage, or more ranks writing",
}
"""Why a way may be ahead of ours, by how its name begins; the longest that fits counts."""

Rows = list[dict[str, Any]]


def tasks(rows: Rows) -> Iterator[tuple[str, str, Rows]]:
    for (task, place), group in groupby(rows, key=lambda row: (row["task"], row["place"])):
        yield task, place, list(group)


def show(found: dict[str, Any]) -> None:
    table = Table("task", "place", "way", "s", "time", "CPU", "peak MB", "stored MB", "seconds of it")
    for row in found["rows"]:
        cells = [f"{row['wall']:.3f}", f"{row['wall_ratio']:.2f}", _ratio(row["cpu_ratio"]), *_bytes(row)]
        table.add_row(row["task"], row["place"], row["way"], *cells, _parts(row))
    Console(width=170).print(table, runs(found), *_absent(found))


def write(found: dict[str, Any], suffix: str, *, readme: bool) -> None:
    """`suffix` of the names of the page and the plot, "" for those that the README means, which have the GPU's rows
    too."""
    found = found | {"absent": _without_gpu(found["absent"])}
    if not suffix:
        found = with_gpu(found)
    image = f"images/peers{suffix}.png"
    plot(found["rows"], os.path.join(DOCS, image))
    with open(os.path.join(DOCS, f"benchmarks{suffix}.md"), "w", encoding="utf-8") as file:
        file.write(page(found, image))
    if readme:
        _into_readme("\n".join(summary(found)))


INTRODUCTION = """\
Every figure is a ratio within one run: each way of a task runs once in each round, in turning order, and what is shown
is the median over the rounds of its time over ours. **Above 1, ckptsync is faster** (or takes less CPU, or pauses for
a shorter time). Peak memory is the growth of the process's resident memory, on the rank where it is largest. Where
ours makes bytes durable with fsync and a peer does not, the peer is shown both ways. Wall times on S3 are mostly those
of the server, a SeaweedFS on the same machine. The script is `benchmarks/peers/`.
"""

NOTES = ", ".join(f"[{n}](design/{name}.md)" for n, name in ((8, "0008-copy-plan"), (17, "0017-fast-transports")))


def joined(paths: Iterable[str]) -> dict[str, Any]:
    """Parts of one table, each run by itself with `--json`. Each part's ratios are within its own run."""
    parts = [_read(path) for path in paths]
    return parts[0] | {
        "whole": True,
        "runs": [run for part in parts for run in part["runs"]],
        "absent": {name: why for part in parts for name, why in part["absent"].items()},
        "rows": [row for part in parts for row in part["rows"]],
    }


def with_gpu(found: dict[str, Any]) -> dict[str, Any]:
    """And what `benchmarks.gpu_peers` found on a machine with a GPU."""
    gpu = _read(GPU)
    return found | {
        "runs": found["runs"] + gpu["runs"],
        "absent": found["absent"] | gpu["absent"],
        "rows": found["rows"] + gpu["rows"],
    }


def _without_gpu(absent: dict[str, str]) -> dict[str, str]:
    """What ran on a GPU is not absent."""
    there = " ".join(row["way"] for row in _read(GPU)["rows"])
    return {name: why for name, why in absent.items() if name not in there}


def _read(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def page(found: dict[str, Any], image: str) -> str:
    size = f"{found['size']:g} GB of bf16 weights, {found['rounds']} rounds"
    out = ["# Beside its peers", "", f"{size}. Made by {runs(found)}.", ""]
    out += [INTRODUCTION, f"![Times of the peers over ours]({image})", ""]
    for task, place, rows in tasks(found["rows"]):
        out += _section(task, place, rows)
    out += [
        "## Not measured",
        "",
        *_absent(found),
        f"- More on GPUs: design notes {NOTES}, by `benchmarks/gpu_*.py`.",
        "",
    ]
    return "\n".join(out)


def runs(found: dict[str, Any]) -> str:
    """Each command, and how busy its machine was."""
    loads = (f" ({run['before']} before, {run['after']} after)" if "before" in run else "" for run in found["runs"])
    return ", ".join(f"`{run['command']}`{load}" for run, load in zip(found["runs"], loads, strict=True))


def _section(task: str, place: str, rows: Rows) -> Iterator[str]:
    names = sorted({name for row in rows for name in row["part_ratios"]} - {"stored"})
    yield from (f"## {task[0].upper()}{task[1:]}, {place}", "")
    heads = [
        "way",
        "seconds",
        "time × ours",
        "CPU × ours",
        *(f"{name} × ours" for name in names),
        "peak MB",
        "stored MB",
    ]
    yield "| " + " | ".join([*heads, "what it does not do"]) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    for row in rows:
        cells = [row["way"], f"{row['wall']:.3f}", f"{row['wall_ratio']:.2f}", _ratio(row["cpu_ratio"]),
                 *(f"{row['part_ratios'].get(name, 0):.2f}" for name in names), *_bytes(row), row["lacks"]]  # fmt: skip
        yield "| " + " | ".join(cells) + " |"
    yield ""
    yield from (f"- Ahead of ours: {line}." for line in ahead(rows))
    yield ""


def ahead(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The ways that took less time than ours, each with why."""
    return [f"{row['way']} ({row['wall_ratio']:.2f}): {_why(row['way'])}" for row in rows
            if row["way"] != OURS and row["wall_ratio"] < EVEN]  # fmt: skip


def _why(way: str) -> str:
    fits = [start for start in WHY if way.startswith(start)]
    return WHY[max(fits, key=len)] if fits else "not known yet"


def summary(found: dict[str, Any]) -> list[str]:
    """The README's lines: one for each task and place, with every peer."""
    lines = ["| task | ckptsync | the others' time over ours | ahead of ours |", "|---|---|---|---|"]
    for task, place, rows in tasks(found["rows"]):
        others = [row for row in rows[1:] if not row["way"].startswith("bare")]
        ratios = " · ".join(f"{row['way']} {row['wall_ratio']:.2f}" for row in others)
        behind = "; ".join(ahead(others)) or "none"
        lines.append(f"| {task}, {place} | {rows[0]['wall']:.2f} s | {ratios} | {behind} |")
    more = "With CPU, memory, stalls, pauses, and what each peer leaves out: [docs/benchmarks.md](docs/benchmarks.md)"
    more += ", [of 2 GB](docs/benchmarks-2gb.md), [of 8 GB](docs/benchmarks-8gb.md)."
    return [*lines, "", f"Medians within one run, by {runs(found)}. {more}"]


def plot(rows: Rows, path: str) -> None:
    """A bar for each peer, by task and place, on a scale where equal distances are equal factors."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    groups = [(task, place, group[1:]) for task, place, group in tasks(rows)]
    heights = [max(1, len(group)) for *_, group in groups]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(8, 0.24 * sum(heights) + 0.55 * len(groups)), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for axis, (task, place, group) in zip(axes[:, 0], groups, strict=True):
        ratios = [row["wall_ratio"] for row in group]
        colours = ["#2a7f62" if ratio >= EVEN else "#b5523b" for ratio in ratios]
        axis.barh([row["way"] for row in group], [ratio - 1 for ratio in ratios], left=1, color=colours)
        axis.set_xscale("log")
        axis.axvline(1, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        axis.set_title(f"{task}, {place}", fontsize=8, loc="left")
    axes[-1, 0].set_xlabel("time over that of ckptsync", fontsize=8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _ratio(found: float | None) -> str:
    """None was not measured."""
    return "" if found is None else f"{found:.2f}"


def _bytes(row: dict[str, Any]) -> list[str]:
    stored, peak = row["parts"].get("stored"), row["peak"]
    return ["" if peak is None else f"{peak / 1e6:.0f}", f"{stored / 1e6:.2f}" if stored else ""]


def _parts(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in row["parts"].items() if name != "stored")


def _absent(found: dict[str, Any]) -> list[str]:
    return [f"- {name}: {why}" for name, why in found["absent"].items()]


def _into_readme(text: str) -> None:
    with open(README, encoding="utf-8") as file:
        old = file.read()
    begin, end = "<!-- peers: begin -->", "<!-- peers: end -->"
    new = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", old, flags=re.DOTALL)
    with open(README, "w", encoding="utf-8") as file:
        file.write(new)
