"""The hosts of a run, and what lives on each:

store        the S3 server
t0, t1       a rank of the trainer on each
one          two embedded engines under one watcher, a small disk for its stage
two          the real engine and its watcher, or an embedded one in its place
far          the mirror, which copies the bucket to a folder on a small disk, and an embedded engine kept on that
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from safetensors.torch import load_file, save_file

from tests.engines.conftest import models
from tests.servers import seaweed

from . import victims
from .disks import disk
from .nets import network
from .trainers import Trainer
from .victims import Victim
from .witness import Replica

HOSTS = ("store", "t0", "t1", "one", "two", "far")
DISKS = {"one": 48 << 20, "far": 256 << 20}
"""Bytes. The mirror's has room for what was collected a minute ago: a collector allows so much for doubtful clocks."""

MODELS = {"one": 1, "two": 2, "three": 2}
"""Name -> seed. The third is the second but for one layer: between these two a delta pays."""

BASE = "one"
"""What every engine starts on."""


class World:
    """Everything of a run, made on `stack` below the empty `folder`. `engine`: sglang, or module for embedded ones
    alone."""

    def __init__(self, folder: str, seed: int, engine: str, stack: ExitStack) -> None:
        self.folder, self.engine, self.logs = folder, engine, f"{folder}/logs"
        os.makedirs(self.logs)
        self.models = {name: known_model(f"{folder}/models/{name}", name) for name in MODELS}
        self.net = stack.enter_context(network())
        self.hosts = {name: self.net.host(name) for name in HOSTS}
        self.server = seaweed.start(f"{folder}/s3", self.hosts["store"].address, self.hosts["store"].prefix)
        stack.callback(self.server.kill)
        self.root, self._env = f"s3://{self.server.bucket}/run", self.server.environment
        self.disks = {name: stack.enter_context(disk(f"{folder}/disk-{name}", size)) for name, size in DISKS.items()}
        self.copy = f"{self.disks['far'].folder}/copy"
        """The mirror's root."""

        self.replicas: list[Replica] = []
        self.engines = self._engines()
        self.watchers = self._watchers()
        mirror = victims.mirror("mirror", self.root, self.copy, self.logs, self._env, self.hosts["far"])
        self.processes = [*self.engines, mirror, *self.watchers]
        self.publishes = f"{self.logs}/publishes.json"
        self.trainer = self._trainer(seed)
        stack.callback(self.trainer.close)
        for process in self.processes:
            stack.callback(process.kill)

    def start(self) -> None:
        os.mkdir(self.copy)
        for process in self.processes:
            process.start()
        self.trainer.start()

    def _engines(self) -> list[Victim]:
        """What takes longest to start comes first."""
        other = "embedded-3" if self.engine == "module" else self.engine
        return [
            self._engine(other, "two", self.engine, "source"),
            self._engine("embedded-1", "one", "module", "source"),
            self._engine("embedded-2", "one", "module", "source"),
            self._engine("embedded-far", "far", "module", "mirror"),
        ]

    def _engine(self, name: str, host: str, kind: str, channel: str) -> Victim:
        log, folder = f"{self.logs}/{name}.log", self.models[BASE]
        if kind == "module":
            victim, url = victims.embedded(name, folder, log, self.hosts[host])
        else:
            victim, url = victims.real(kind, folder, log, self.hosts[host])
        self.replicas.append(Replica(name, url, kind, channel))
        return victim

    def _watchers(self) -> list[Victim]:
        real, first, second, far = (replica.url for replica in self.replicas)
        stages = {"one": self.disks["one"].folder, "two": self.folder, "far": self.disks["far"].folder}
        with open(f"{self.folder}/engines", "w") as file:
            file.write(f"{first}\n{second}\n")
        return [
            victims.watcher(
                name, root, self.logs, self._env, self.hosts[host],
                "--stage", f"{stages[host]}/stage", "--engine", kind, *engines,
            )
            for name, root, host, kind, engines in (
                ("fleet", self.root, "one", "module", ("--engines-file", f"{self.folder}/engines")),
                ("single", self.root, "two", self.engine, ("--url", real)),
                ("distant", self.copy, "far", "module", ("--url", far)),
            )
        ]  # fmt: skip

    def _trainer(self, seed: int) -> Trainer:
        named = [word for name, folder in self.models.items() for word in ("--model", f"{name}={folder}")]
        told = ["--seed", str(seed), "--stop", f"{self.folder}/stop", "--log", self.publishes]
        return Trainer([self.hosts["t0"], self.hosts["t1"]], [self.root, *named, *told], self._env, self.logs)


def known_model(folder: str, name: str) -> str:
    """Writes its checkpoint; returns the folder."""
    models.tiny_model(folder, MODELS[name])
    if name != "three":
        return folder
    for shard in sorted(each for each in os.listdir(folder) if each.endswith(".safetensors")):
        path = os.path.join(folder, shard)
        tensors = {
            key: value.flip(0).contiguous() if ".layers.1.mlp." in key else value
            for key, value in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return folder
