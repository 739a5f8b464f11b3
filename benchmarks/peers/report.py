"""What was found, for people: a table on the terminal, docs/benchmarks.md with its plot, and the README's lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.clock import OURS

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
DOCS = os.path.join(ROOT, "docs")
README = os.path.join(ROOT, "README.md")
GPU = os.path.join(ROOT, "benchmarks", "results", "gpu-peers.json")
EVEN = 0.95
"""Below this ratio a peer is ahead: rounds differ by more than the rest."""

COSTS = ("time", "CPU", "pause", "stall")
"""In which a way may be ahead."""

WAITED_FOR = ("time", "pause", "stall")
"""Those of the README."""

LIVE = "one call in one process: nothing is committed, digested, staged, proven; it reads what its save left in memory"
WHY = {
    "bare": "the limit: it writes or reads the bytes and does nothing else",
    "safetensors load_file": "it maps the store's own pages; ours leaves a verified copy that outlives them",
    "safetensors save_file": "it digests nothing and leaves no commit",
    "transformers from_pretrained": "as load_file",
    "transformers save_pretrained": "as save_file",
    "runai-model-streamer": "it verifies nothing, and leaves nothing for the next engine of the host",
    "fastsafetensors": "it verifies nothing, and leaves nothing for the next engine of the host",
    "torch.load": "it verifies nothing, leaves nothing for the next engine, and must not read what strangers wrote",
    "torch.save": "it digests nothing and leaves no commit, and what it writes must not be loaded from strangers",
    "torch.save + fsync, torch.load mapped": LIVE,
    "save_file": LIVE,
    "save_pretrained": LIVE,
    "DCP": "every rank writes its own shards and nothing is gathered, so only DCP reads it; no digest",
    "DCP save, load in place": "it reads straight into the live tensors: a failure leaves a mix; no digest, no proof",
    "DCP load": "it verifies nothing, and leaves nothing for the next engine of the host",
    "s3fs get": "it verifies nothing",
    "slime": "XOR and zstd-1 are less work and twice the bytes; it is applied in place, so a failure leaves a mix",
    "Fireworks": "adler32 only, no commit, more bytes; what it writes of arc_v3 must not be loaded from strangers",
    "reload_weights": "it gathers and proves nothing beforehand: vLLM is paused for all of it",
    "checkpoint-engine": "it proves nothing, and vLLM is paused for longer",
    "ckptsync load_tensors": "ours without a stage, into the tensors of one process",
    "ckptsync": "ours, done in another way",
}
"""Why a way may be ahead of ours, by how its name begins; the longest that fits counts."""

PLACES = ("disk", "/dev/shm", "S3")
EVERYWHERE = ("publish", "stage + verify", "publish to live")
TASKS = (*EVERYWHERE, "publish, 2 FSDP2 ranks", "delta, publish", "delta, apply")

Rows = list[dict[str, Any]]


def tasks(rows: Rows) -> Iterator[tuple[str, str, Rows]]:
    """Ours first, the base of the ratios."""
    for (task, place), group in groupby(rows, key=lambda row: (row["task"], row["place"])):
        yield task, place, sorted(group, key=lambda row: row["way"] != OURS)


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


INTRODUCTION = f"""\
Every figure is a ratio within one run: each way of a task runs once in each round, in turning order, and what is shown
is the median over the rounds of its time over ours. **Above 1, ckptsync is faster** (or takes less CPU, or pauses for
a shorter time); a way is called ahead of ours below {EVEN}. Peak memory is what the process's resident memory grew by,
on the rank where it is largest: what a call uses again of what earlier ones left in the same process does not count.
Where ours makes bytes durable with fsync and a peer does not, the peer is shown both ways. Wall times on S3 are mostly
those of the server, a SeaweedFS on the same machine. Deltas are of a quarter of the size; slime's are written by its
published layout. In publish to live our watcher is woken after the commit, as a trainer's `POST /wake` does it.
The script is `benchmarks/peers/`.
"""

ELSEWHERE = (
    "ranks and deltas: on a disk alone",
    "on S3: DCP's HF writer, fastsafetensors and torch.load",
)
"""What no run of any size has."""

NOTES = ", ".join(f"[{n}](design/{name}.md)" for n, name in ((8, "0008-copy-plan"), (17, "0017-fast-transports")))


def joined(paths: Iterable[str]) -> dict[str, Any]:
    """Parts of one table, each run by itself with `--json`. Each part's ratios are within its own run."""
    parts = [_part(path) for path in paths]
    if len({(part["size"], part["rounds"]) for part in parts}) > 1:
        raise ValueError("these are parts of different tables: their sizes or rounds differ")
    rows = [row for part in parts for row in (_made(part) if len(parts) > 1 else part["rows"])]
    return parts[0] | {
        "runs": [run for part in parts for run in part["runs"]],
        "absent": {name: why for part in parts for name, why in part["absent"].items()},
        "rows": sorted(rows, key=_order),
    }


def _made(part: dict[str, Any]) -> Rows:
    """Its rows, each with the command that it is of."""
    return [{"made": runs(part), **row} for row in part["rows"]]


def _part(path: str) -> dict[str, Any]:
    """ValueError, naming the file, for what no run of the peers printed."""
    try:
        found = _read(path)
        missing = {"size", "rounds", "runs", "absent", "rows"} - found.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not what `--json` prints: {error}") from error
    if missing:
        raise ValueError(f"{path} is not what `--json` prints: it has no {', '.join(sorted(missing))}")
    return dict(found)


def _order(row: dict[str, Any]) -> tuple[int, int]:
    return TASKS.index(row["task"]), PLACES.index(row["place"])


def whole(found: dict[str, Any]) -> bool:
    """Whether every task is there, and at every place where one process does it."""
    there = {(row["task"], row["place"]) for row in found["rows"]}
    return there >= {(task, place) for task in TASKS for place in (PLACES if task in EVERYWHERE else PLACES[:1])}


def with_gpu(found: dict[str, Any]) -> dict[str, Any]:
    """And what `benchmarks.gpu_peers` found on a machine with a GPU."""
    gpu = _read(GPU)
    return found | {
        "runs": found["runs"] + gpu["runs"],
        "absent": found["absent"] | gpu["absent"],
        "rows": found["rows"] + _made(gpu),
    }


def _without_gpu(absent: dict[str, str]) -> dict[str, str]:
    """What ran on a GPU is not absent."""
    there = " ".join(row["way"] for row in _read(GPU)["rows"])
    return {name: why for name, why in absent.items() if name not in there}


def _read(path: str) -> Any:
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def page(found: dict[str, Any], image: str) -> str:
    rounds = f"{found['rounds']} round{'s' * (found['rounds'] > 1)}"
    out = ["# Beside its peers", "", f"{found['size']:g} GB of bf16 weights, {rounds}. Made by {runs(found)}.", ""]
    out += [INTRODUCTION, f"![Times of the peers over ours]({image})", ""]
    for task, place, rows in tasks(found["rows"]):
        out += _section(task, place, rows)
    out += [
        "## Not measured",
        "",
        *_absent(found),
        *(f"- {each}" for each in ELSEWHERE),
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
    yield from (f"## {task[0].upper()}{task[1:]}, {place}, {rows[0]['gb']:.2g} GB", "")
    if "made" in rows[0]:
        yield from (f"Made by {rows[0]['made']}.", "")
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


def ahead(rows: Iterable[dict[str, Any]], costs: Collection[str] = COSTS) -> list[str]:
    """The ways that cost less than ours, in which respect, and why; those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        less = [f"{name} {ratio:.2f}" for name, ratio in _ratios(row).items() if name in costs and ratio < EVEN]
        if less and row["way"] != OURS:
            by_reason.setdefault(_why(row["way"]), []).append(f"{row['way']} ({', '.join(less)})")
    return [f"{'; '.join(ways)}: {why}" for why, ways in by_reason.items()]


def _ratios(row: dict[str, Any]) -> dict[str, float]:
    found = {"time": row["wall_ratio"], "CPU": row["cpu_ratio"], **row["part_ratios"]}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def _why(way: str) -> str:
    fits = [start for start in WHY if way.startswith(start)]
    return WHY[max(fits, key=len)] if fits else "not known yet"


def summary(found: dict[str, Any]) -> list[str]:
    """The README's lines: one for each task and place, with every peer."""
    lines = ["| task | ckptsync | the others' time over ours | ahead of ours |", "|---|---|---|---|"]
    for task, place, rows in tasks(found["rows"]):
        ratios = " · ".join(f"{row['way']} {row['wall_ratio']:.2f}" for row in rows[1:])
        others = [row for row in rows if not row["way"].startswith(("bare", OURS))]
        behind = "; ".join(ahead(others, WAITED_FOR)) or "none"
        own = "" if rows[0]["way"] == OURS else rows[0]["way"].removeprefix(OURS)
        lines.append(f"| {task}, {place} | {rows[0]['wall']:.2f} s{own} | {ratios} | {behind} |")
    more = f"Below {EVEN} a way is ahead; a bare write or read is the limit. With CPU, memory, bytes stored, stalls and"
    more += " pauses, and what each leaves out: [docs/benchmarks.md](docs/benchmarks.md)"
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
