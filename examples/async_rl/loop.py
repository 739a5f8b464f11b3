"""Asynchronous GRPO: rollout actors sample while two FSDP2 ranks train on what is at most `--max-lag` versions old.

    python examples/async_rl/loop.py --steps 16 --cut-at 5 --kill-at 10 --out ./async-rl

At `--cut-at` the fast path breaks off in mid-sync and training goes on over files. At `--kill-at` the trainer's node is
killed in mid-step; another resumes from the channel. One line of JSON for each step goes to stdout and OUT/run.jsonl,
and OUT/run.png shows reward, versions and staleness.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import ray
from plot import plot
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from rollout import Rollout, Sample, problems
from trainer import ENGINES, Settings, Trainers

from ckptsync.channel import Channel
from ckptsync.demo.smollm2 import smollm2
from watchers.ray import Board, NotFresh, PartialFailure, node_of, open_board, watch

EMBEDDED = f"{sys.executable} -m watchers.engines.embedded_server"
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 << 20}


class Nodes:
    """A Ray cluster on this machine: one node for driver and rollouts, one for the trainer, which can be lost."""

    def __init__(self, folder: str) -> None:
        os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        head = {**NODE, "include_dashboard": False, "resources": {"rollout": 2}}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(self.cluster.address, log_to_driver=False)

    def add_trainer(self) -> None:
        self.trainer = self.cluster.add_node(**NODE, resources={"trainer": 2})

    def lose_trainer(self) -> None:
        """As a node dies: without a word to anybody."""
        self.cluster.remove_node(self.trainer, allow_graceful=False)

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


@dataclass
class Rollouts:
    """Keeps two calls under way on each actor, so that none waits for the trainer."""

    actors: dict[str, ActorHandle]
    board: Board
    group: int
    max_lag: int
    running: dict[Any, str] = field(default_factory=dict)
    left: list[Sample] = field(default_factory=list)

    def take(self, count: int, history: Sequence[str], dropped: Counter[str]) -> list[Sample]:
        """So many samples that are at most `max_lag` versions old. What is older, or of a version that a lost trainer
        took with it, is dropped and counted."""
        taken: list[Sample] = []
        while len(taken) < count:
            if not self.left:
                self.left = self._next(history)
            sample = self.left.pop()
            if sample.version not in history:
                dropped["lost"] += 1
            elif age(sample, history) > self.max_lag:
                dropped["stale"] += 1
            else:
                taken.append(sample)
        return taken

    def _next(self, history: Sequence[str]) -> list[Sample]:
        oldest = history[max(0, len(history) - 1 - self.max_lag)]
        self._submit(oldest)
        if not self.running:
            self.board.wait_for(oldest, timeout=120.0, engines=list(self.actors))
            self._submit(oldest)
        (done, *_), _ = ray.wait(list(self.running))
        del self.running[done]
        samples: list[Sample] = ray.get(done)
        for sample in samples:
            if sample.version:
                self.board.used(sample.version)
        return samples

    def _submit(self, oldest: str) -> None:
        """The gate: an engine that was left behind gets no work."""
        for name, actor in self.actors.items():
            while list(self.running.values()).count(name) < 2 and self._serves(name, oldest):
                self.running[actor.rollout.remote(problems(1), self.group)] = name

    def _serves(self, name: str, oldest: str) -> bool:
        try:
            self.board.wait_for(oldest, timeout=0.0, engines=[name])
        except NotFresh:
            return False
        return True


def age(sample: Sample, history: Sequence[str]) -> int:
    """Versions that are newer than the one that sampled it."""
    return len(history) - 1 - list(history).index(sample.version)


class Loop:
    """`history`: the labels that training went through, oldest first, without what was lost with a trainer."""

    def __init__(self, options: argparse.Namespace, nodes: Nodes, settings: Settings, rollouts: Rollouts) -> None:
        self.options, self.nodes, self.settings, self.rollouts = options, nodes, settings, rollouts
        self.started, self.rows = time.monotonic(), list[dict[str, Any]]()
        self.history: list[str] = []
        self.killed = self.cut = False
        self.trainers = self._start()

    def run(self) -> None:
        step = 0
        while step < self.options.steps:
            dropped: Counter[str] = Counter()
            samples = self.rollouts.take(self.options.batch, self.history, dropped)
            ages = [age(sample, self.history) for sample in samples]
            reward = sum(sample.reward for sample in samples) / len(samples)
            try:
                report = self._update(samples, step + 1)
            except PartialFailure as error:
                self.note(event="trainer lost", why=str(error).splitlines()[0])
                self._resume()
                step = self.rows[-1]["step"]
                continue
            self._brought(report)
            step = report.step
            self.note(event="step", reward=reward, ages=ages, dropped=dict(dropped), **asdict(report))

    def note(self, **row: Any) -> None:
        self.rows.append({"seconds_in": round(time.monotonic() - self.started, 1), **row})
        print(json.dumps(self.rows[-1]), flush=True)

    def _update(self, samples: Sequence[Sample], step: int) -> Any:
        if step >= self.options.cut_at and not self.cut:
            self.cut = True
            self.trainers.cut()
        if step >= self.options.kill_at and not self.killed:
            self.killed = True
            threading.Timer(self.options.kill_after, self.nodes.lose_trainer).start()
        return self.trainers.update(samples)

    def _resume(self) -> None:
        self.trainers.kill()
        self.nodes.add_trainer()
        self.trainers = self._start()

    def _start(self) -> Trainers:
        """A trainer group, whose weights the engines serve."""
        trainers = Trainers(self.settings)
        if trainers.resumed_from in self.history:
            self.history = self.history[: self.history.index(trainers.resumed_from) + 1]
        elif trainers.resumed_from:  # committed, but the trainer died before it could say so
            self.history.append(trainers.resumed_from)
        report = trainers.sync()
        self._brought(report)
        self.note(event="begin", resumed_from=trainers.resumed_from, **asdict(report))
        return trainers

    def _brought(self, report: Any) -> None:
        self.history.append(report.version)
        self.rollouts.board.push(report.version, step=report.step)
        for name, label in report.served.items():
            self.rollouts.board.serving(name, label if label == report.version else None)


@contextmanager
def rollout_actors(options: argparse.Namespace, model: str) -> Iterator[dict[str, ActorHandle]]:
    make = partial(Rollout.remote, options.engine, options.serve, model, options.max_tokens)
    actors = {f"rollout-{number}": make() for number in range(2)}
    try:
        yield actors
    finally:
        ray.get([actor.stop.remote() for actor in actors.values()])


def play(
    options: argparse.Namespace, model: str, nodes: Nodes, actors: dict[str, ActorHandle], stage: str
) -> list[dict[str, Any]]:
    """What happened, row by row."""
    root, (adapter, _) = os.path.abspath(os.path.join(options.out, "channel")), ENGINES[options.engine]
    Channel.create(root)
    urls = {name: ray.get(actor.ready.remote(600)) for name, actor in actors.items()}
    board = open_board("async-rl", root)
    engines = {name: partial(adapter, url) for name, url in urls.items()}
    watchers = watch(root, {node_of(actors["rollout-0"]): engines}, stage=stage, board=board, poll=1.0)
    nodes.add_trainer()  # now, so that nothing else is on the node that will be lost
    settings = Settings(root=root, model=model, kind=options.engine, engines=urls, lr=options.lr)
    loop = Loop(options, nodes, settings, Rollouts(actors, board, options.group, options.max_lag))
    loop.run()
    loop.note(event="end", staleness=dict(board.staleness()))
    ray.get([watcher.stop.remote() for watcher in watchers.values()])
    return loop.rows


def main() -> None:
    options = parse()
    os.makedirs(options.out, exist_ok=True)
    model = options.model or smollm2()
    with (
        tempfile.TemporaryDirectory(prefix="rl-", ignore_cleanup_errors=True) as scratch,  # short, for Ray's sockets
        closing(Nodes(scratch)) as nodes,
        rollout_actors(options, model) as actors,
    ):
        rows = play(options, model, nodes, actors, os.path.join(scratch, "stage"))
    with open(os.path.join(options.out, "run.jsonl"), "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    plot(rows, os.path.join(options.out, "run.png"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    parser.add_argument("--serve", default=EMBEDDED, help="command that starts a server; MODEL and --port are added")
    parser.add_argument("--model", default="", help="a Hugging Face folder; SmolLM2-135M without one")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="samples of one step")
    parser.add_argument("--group", type=int, default=8, help="answers to one problem")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--max-lag", type=int, default=2, help="versions that a sample may be old")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--cut-at", type=int, default=5, help="step in which the fast path breaks off")
    parser.add_argument("--kill-at", type=int, default=10, help="step in which the trainer's node is lost")
    parser.add_argument("--kill-after", type=float, default=1.0, help="seconds after that step began")
    parser.add_argument("--out", default="async-rl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
