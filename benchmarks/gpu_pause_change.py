"""The pause for a version of which few elements changed: what `gpu_pause --change 0.01` measures beside the full one.

- change    start, update, finish, after `prepare` has found what changed; the proof of everything live inside
- scatter   the places and values alone into the live parameters, and how long the host takes to send them off
- exact     every live element against the files, bit for bit, after the last scatter
- outputs   greedy tokens and logprobs against the stock reload of the same files
- crossover seconds to scatter a share of one piece's elements, and to copy the piece whole: what `changes.MOST` is from
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_common import DEVICE, compare, note, rounds, seconds, synchronize

BAR = 0.040
DENSITIES = (0.01, 0.03, 0.0625, 0.125, 0.25)


def measure_change(engine: Any, held: Any, other: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """The engine holds `held`; of `other` this share of the elements differs from it."""
    note(result, change_share=args.change)
    live = engine.engine.live
    if DEVICE == "cpu":
        live._on_cuda = lambda: True  # a CPU would only make views; here plain memory stands for pinned memory
    of_held = engine.outputs()
    note(result, change_stock=seconds(lambda: engine.stock(other)))
    of_other = engine.outputs()
    engine.prepare(held)
    engine.update(held)  # whole: the stock reload came between
    found = rounds(engine, (other, held), args.rounds)
    note(result, **{f"change_{name}": values for name, values in found.items()})
    engine.prepare(other)
    note(result, change_first=seconds(lambda: engine.update(other)))
    note(result, **scatter_alone(live, args.rounds))
    note(result, **compare("outputs_change_equal_stock", engine.outputs(), of_other))
    note(result, change_wrong=wrong_elements(live, other), change_outputs_differ=of_held != of_other)
    result["bars"] |= change_bars(result, args.change)


def scatter_alone(live: Any, count: int) -> dict[str, float]:
    """Of the filling that is live already: it writes what is there."""
    from watchers.live.copy_plan import targets_of
    from watchers.live.readback import live_views

    pieces = live._payload._ready
    views = live_views(live._plan, targets_of(live.model))
    timed = [_timed(pieces.changes.put(views, pieces.pieces)) for _ in range(count + 1)]
    return {"change_sent": min(sent for sent, _ in timed), "change_scatter": min(done for _, done in timed)}


def wrong_elements(live: Any, version: Any) -> list[str]:
    """Names of what differs from the files anywhere."""
    from watchers.live.copy_plan import gather, targets_of
    from watchers.live.readback import differing

    return differing(live._plan, targets_of(live.model), gather(live._plan, live._checked(version)))


def crossover(device: str) -> dict[str, list[float]]:
    """share -> seconds to scatter it, seconds to copy the whole piece; each the best of five."""
    from watchers.live.changes import host_memory, pack, patch

    count = 1 << (26 if device == "cuda" else 18)
    live = torch.zeros(count, dtype=torch.bfloat16, device=device)
    piece = host_memory(2 * count).view(torch.bfloat16).zero_()
    whole = pack([None], [piece])
    found = {}
    for share in DENSITIES:
        changes = pack([patch(piece, torch.where(torch.rand(count) < share, piece + 1, piece), count)], [piece])
        scatter, copy = (min(_timed(each.put([live], [piece]))[1] for _ in range(5)) for each in (changes, whole))
        found[str(share)] = [scatter, copy]
    return found


def _timed(put: Iterator[int]) -> tuple[float, float]:
    """Seconds until all was sent off, and until it was there."""
    synchronize()
    started = time.perf_counter()
    for _ in put:
        pass
    sent = time.perf_counter() - started
    synchronize()
    return sent, time.perf_counter() - started


def change_bars(result: dict[str, Any], share: float) -> dict[str, bool]:
    result["change_pause"] = statistics.median(result["change_pause_all"])
    moved = all(each is not None for each in result["change_moved_all"])
    bars = {
        "change: only what changed was moved": moved,
        "change: outputs": result["outputs_change_equal_stock"],
        "change: every element": not result["change_wrong"],
    }
    if torch.cuda.is_available() and share <= 0.01:
        bars[f"change: pause <= {BAR * 1e3:.0f} ms"] = result["change_pause"] <= BAR
    return bars


def change_table(result: dict[str, Any]) -> str:
    gb, moved = result["bytes"] / 1e9, statistics.median(result["change_moved_all"]) / 1e9
    rows = [
        ("change: start, update with proof, finish", result["change_pause"]),
        ("  of which in the worker's update", statistics.median(result["change_inside_all"])),
        ("  of which the read-back proof, beyond the scatter", statistics.median(result["change_proof_all"])),
        ("  the scatter alone, best", result["change_scatter"]),
        ("    of which the host sends it off", result["change_sent"]),
        ("  the proof alone, best", result["proof_alone"]),
        ("the full copy, in this run", result["pause"]),
        ("limit: pinned copy of everything", result["limit"]),
        ("stock reload_weights of the changed version", result["change_stock"]),
        ("before the pause: prepare (compare, pinned)", statistics.median(result["change_prepare_all"])),
    ]
    lines = ["", f"{result['change_share']:.2%} of the elements differ; {moved:.3f} of {gb:.2f} GB are moved", ""]
    lines += ["| | seconds |", "|---|---|", *(f"| {name} | {value:.4f} |" for name, value in rows), ""]
    lines += [
        f"{share}: scatter {a * 1e3:.3f} ms, copy {b * 1e3:.3f} ms" for share, (a, b) in result["crossover"].items()
    ]
    difference = result["outputs_change_equal_stock_logprob_difference"]
    lines.append(
        f"outputs equal the stock reload's: {result['outputs_change_equal_stock']}, logprobs by {difference:.2g}"
    )
    bars = ((name, met) for name, met in result["bars"].items() if name.startswith("change"))
    return "\n".join([*lines, *(f"{'met   ' if met else 'MISSED'} {name}" for name, met in bars)])
