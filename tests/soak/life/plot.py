"""Memory, objects and lag over the time of a run, as `soak.png`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt


def plot(samples: Sequence[dict[str, Any]], path: str) -> None:
    figure, (memory, objects, lag) = plt.subplots(3, 1, figsize=(11, 10), sharex=True, constrained_layout=True)
    weights: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for name, weight in sample["processes"].items():
            if "kib" in weight:
                weights[name, weight["life"]].append((sample["at"] / 60, weight["kib"] / 1024))
    for (name, _), line in weights.items():
        memory.plot(*zip(*line, strict=True), color=_color(name), linewidth=0.8)
    memory.set_ylabel("anonymous memory, MiB\n(orange: publisher, green: mirror, grey: the run itself)")
    minutes = [sample["at"] / 60 for sample in samples]
    for name in ("source", "target"):
        looks = [sample["channels"][name] for sample in samples]
        objects.plot(minutes, [sum(look["files"].values()) for look in looks], label=f"objects at the {name}")
        objects.plot(minutes, [look["versions"] for look in looks], label=f"versions at the {name}")
    objects.legend(loc="upper left", ncols=2, fontsize=8)
    lags: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for sample in samples:
        for channel in sample["channels"].values():
            for reader, (versions, _, _) in channel["lag"].items():
                if reader.startswith(("s-", "t-", "from-")):
                    lags[reader].append((sample["at"] / 60, versions))
    for reader, line in lags.items():
        color = "tab:purple" if reader.startswith("t-") else "tab:blue"
        lag.plot(*zip(*line, strict=True), color=color, linewidth=0.6, alpha=0.7)
    lag.set_ylabel("versions behind, readers of the newest\n(blue: at the source, purple: at the mirror)")
    lag.set_xlabel("minutes")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _color(name: str) -> str:
    return {"publisher": "tab:orange", "mirror": "tab:green", "director": "tab:gray"}.get(name, "tab:blue")
