"""What a run looked like: reward, versions and staleness, with the cut and the kill marked.

python examples/async_rl/plot.py OUT/run.jsonl OUT/run.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = Mapping[str, Any]


def plot(rows: Sequence[Row], path: str) -> None:
    """`rows` are those of `loop.py`."""
    steps = [row for row in rows if row["event"] == "step"]
    figure, (reward, versions, staleness) = plt.subplots(3, 1, sharex=True, figsize=(8, 8), layout="constrained")
    x = range(1, len(steps) + 1)
    reward.plot(x, [row["reward"] for row in steps], marker="o")
    reward.set_ylabel("mean reward")
    for transport in dict.fromkeys(row["transport"] for row in steps):
        of = [(at, _number(row["version"])) for at, row in zip(x, steps, strict=True) if row["transport"] == transport]
        versions.plot(*zip(*of, strict=True), "o", label=f"by {transport}")
    for engine in steps[0]["served"]:
        served = [_number(row["served"][engine]) for row in steps]
        versions.step(x, served, where="post", alpha=0.5, label=f"{engine} serves")
    versions.set_ylabel("version")
    versions.legend(fontsize="small")
    ages = [(at, old) for at, row in zip(x, steps, strict=True) for old in row["ages"]]
    staleness.plot(x, [sum(row["ages"]) / len(row["ages"]) for row in steps], label="mean age of samples")
    staleness.scatter(*zip(*ages, strict=True), s=8, alpha=0.3)
    staleness.bar(x, [sum(row["dropped"].values()) for row in steps], alpha=0.3, label="dropped samples")
    staleness.set_ylabel("versions behind")
    staleness.set_xlabel("update")
    staleness.legend(fontsize="small")
    for at, text in _marks(rows):
        for axis in (reward, versions, staleness):
            axis.axvline(at, color="red", linestyle=":")
        reward.annotate(text, (at, reward.get_ylim()[0]), color="red", rotation=90, fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _marks(rows: Sequence[Row]) -> list[tuple[float, str]]:
    """Where the fast path broke off with engines touched, and where the trainer was lost."""
    found, at = [], 0
    for row in rows:
        at += row["event"] == "step"
        if any("(touched" in failure for failure in row.get("failures", ())):
            found.append((float(at), "fast path cut"))
        if row["event"] == "trainer lost":
            found.append((at + 0.5, "trainer lost"))
    return found


def _number(label: str) -> float:
    """Of `e2-v7`; nothing for an engine that serves no version."""
    number = label.rpartition("-v")[2]
    return float(number) if number.isdigit() else float("nan")


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as lines:
        plot([json.loads(line) for line in lines], sys.argv[2])
