"""From files in memory into a vLLM on a GPU, beside checkpoint-engine, fastsafetensors and runai-model-streamer.

    python -m benchmarks.gpu_peers [--shape 4b|tiny] [--work /dev/shm/gpu-peers] [--rounds 3] [--json FILE]

One vLLM in this process, and two versions. In each round each way brings it once from the one to the other, in turning
order, and vLLM's greedy tokens must then be those of the version's stock load:

- ckptsync: `prepare` beside the serving engine; then start, update and finish, with the proof of what is live inside
- checkpoint-engine, in a process of its own on the same GPU: register_checkpoint, which pins the files where they lie
  or copies of them, and gather_metas; then update, over CUDA IPC into vLLM's worker by its own extension
- reload_weights, as it is in vLLM
- reload_weights, from the iterators that vLLM has for fastsafetensors and runai-model-streamer

The pause is what vLLM cannot serve in; the time is that and what comes before it. Needs what `gpu_pause` needs, and
checkpoint-engine, fastsafetensors and runai-model-streamer on PYTHONPATH (the versions of tests/envs/peers.txt); what
does not run is said in its own words. With `--json` the page of the peers has it from there (`results/gpu-peers.json`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import in_worker
from benchmarks.common import load
from benchmarks.gpu_checkpoint_engine import EXTENSION, CheckpointEngine
from benchmarks.gpu_common import DEVICE, seconds
from benchmarks.gpu_pause import Engine, device_name, library_versions, make_version
from benchmarks.peers.clock import OURS, Row, Taken, row, turns
from benchmarks.shapes import SHAPES
from ckptsync.engine import StagedVersion

TASK = "into vLLM"
UNPROVEN = "no discovery, no digest, no proof"
MIX = UNPROVEN + ", a failure leaves a mix"


@dataclass(frozen=True, slots=True)
class Way:
    """`before` runs beside the serving engine, `update` while it is paused."""

    name: str
    update: Callable[[StagedVersion], object]
    before: Callable[[StagedVersion], object] = lambda _: None
    lacks: str = ""
    ready: Callable[[StagedVersion], object] = lambda _: None
    """What is no part of it, and not counted."""


def ways_of(engine: Engine, other: CheckpointEngine | None) -> list[Way]:
    from vllm.model_executor.model_loader import weight_utils as loaders

    def by(iterate: Callable[..., Iterable[Any]]) -> Callable[[StagedVersion], None]:
        return lambda version: engine.worker.model_runner.reload_weights(
            weights_iterator=iterate(files_of(version), use_tqdm_on_load=False)
        )

    found = [
        Way(OURS, engine.update, engine.prepare),
        Way("reload_weights", engine.stock, lacks=MIX),
        Way("reload_weights, by runai-model-streamer", by(loaders.runai_safetensors_weights_iterator), lacks=MIX),
        Way("reload_weights, by fastsafetensors", by(loaders.fastsafetensors_weights_iterator), lacks=MIX),
    ]
    if other is not None:
        found[2:2] = [of_other(engine, other, "a pinned copy", inplace=False),
                      of_other(engine, other, "pinned in place", inplace=True)]  # fmt: skip
    return found


def of_other(engine: Engine, other: CheckpointEngine, how: str, *, inplace: bool) -> Way:
    return Way(
        f"checkpoint-engine, {how}", lambda _: other.update(engine.llm), lambda _: other.register(inplace=inplace), MIX,
        lambda version: other.stage(version.folder),
    )  # fmt: skip


def files_of(version: StagedVersion) -> list[str]:
    (track,) = version.manifest.tracks.values()
    return [os.path.join(version.folder, file.name) for file in track.files]


def measure(args: argparse.Namespace, absent: dict[str, str]) -> tuple[list[Row], int]:
    shape = SHAPES[args.shape]
    a, b = (make_version(os.path.join(args.work, name), shape, seed, DEVICE) for seed, name in enumerate("ab", 1))
    nbytes = sum(entry.spec.nbytes for entry in a.manifest.tracks["model"].tensors)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with CheckpointEngine(os.path.join(args.work, "pinned")) as guest:
        other = guest if runs("checkpoint-engine", guest.start, absent) else None
        engine = Engine(a.folder, args, **({"worker_extension_cls": EXTENSION} if other else {}))
        expected = {a.label: engine.outputs()}
        engine.stock(b)
        expected[b.label] = engine.outputs()
        ways = ways_of(engine, other)

        def once(way: Way, held: StagedVersion, wanted: StagedVersion) -> Taken:
            return taken(engine, way, held, wanted, expected, guest.cpu)

        def tried(way: Way) -> bool:
            able = runs(way.name, lambda: once(way, a, b), absent)
            if not able:
                engine.stock(a)  # what it began with may be half gone
            return able

        able = [way for way in ways if tried(way)]
        found: dict[str, list[Taken]] = {way.name: [] for way in able}
        for number, name in enumerate(turns(list(found), args.rounds)):
            way = next(way for way in able if way.name == name)
            pair = (a, b) if number // len(able) % 2 == 0 else (b, a)
            found[name].append(once(way, *pair))
            print(name, found[name][-1].parts, file=sys.stderr, flush=True)
    gb = nbytes / 1e9
    place = f"{device_name().removeprefix('NVIDIA ')}, {gb:.1f} GB"
    return [row(TASK, place, way.name, way.lacks, gb, found[way.name], found[OURS]) for way in able], nbytes


def taken(
    engine: Engine,
    way: Way,
    held: StagedVersion,
    wanted: StagedVersion,
    expected: dict[str, Any],
    elsewhere: Callable[[], float],
) -> Taken:
    """From `held`, which is brought there by us first. SystemExit if vLLM does not compute with `wanted` after."""
    engine.prepare(held)
    engine.update(held)
    way.ready(wanted)
    cpu = time.process_time() + elsewhere()
    before = seconds(lambda: way.before(wanted))
    pause = seconds(lambda: way.update(wanted))
    cpu = time.process_time() + elsewhere() - cpu
    tokens, _ = engine.outputs()
    if tokens != expected[wanted.label][0]:
        raise SystemExit(f"{way.name}: vLLM does not compute with {wanted.label}")
    return Taken(before + pause, cpu, 0, {"pause": pause})


def runs(name: str, work: Callable[[], object], absent: dict[str, str]) -> bool:
    """Once, uncounted; if it does not run here, `absent` has why."""
    try:
        work()
    except Exception as error:
        if name == OURS:
            raise
        absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(f"{name}: {absent[name]}", file=sys.stderr, flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="From files in memory into a vLLM on a GPU.")
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--work", default="/dev/shm/gpu-peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    args.graphs = False
    in_worker.arrange()
    shutil.rmtree(args.work, ignore_errors=True)
    os.makedirs(args.work)
    absent: dict[str, str] = {}
    before = load()
    try:
        rows, nbytes = measure(args, absent)
    finally:
        shutil.rmtree(args.work, ignore_errors=True)
    command = f"python -m benchmarks.gpu_peers --shape {args.shape} --rounds {args.rounds}"
    found = {
        "runs": [{"command": command, "before": before, "after": load()}], "bytes": nbytes, "device": device_name(),
        **library_versions(), "rounds": args.rounds, "absent": absent,
        "rows": [each.to_json() | {"peak": None} for each in rows],
    }  # fmt: skip
    for each in rows:
        print(f"{each.way}: {each.wall:.3f} s ({each.wall_ratio:.2f}), pause {each.parts['pause']:.3f} s "
              f"({each.part_ratios['pause']:.2f})", flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads may hold up a normal exit
