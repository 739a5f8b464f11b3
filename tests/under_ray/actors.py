"""Actors of the tests: engines, and what a test asks of any actor."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ckptsync.engine import EngineStatus, StagedVersion
from ckptsync.testing.engines import FakeEngine
from tests.waiting import until
from tests.watcher.publish import SCHEMA
from watchers.ray import GROUPS, EngineActor
from watchers.ray.calls import get


class Told(FakeEngine):
    """Hangs, dies or has a bug in a step, as a test tells it to. Another process is another boot."""

    def __init__(self, name: str) -> None:
        super().__init__(SCHEMA)
        self.called, self.boot_id = name, f"process {os.getpid()}"
        self.told: dict[str, str] = {}

    def status(self) -> EngineStatus:
        self._as_told("status")
        return super().status()

    def update(self, version: StagedVersion) -> None:
        self._as_told("update")
        super().update(version)

    def _as_told(self, step: str) -> None:
        while self.told.get(step) == "hang":
            time.sleep(0.05)
        if self.told.get(step) == "die":
            os._exit(1)
        if self.told.get(step) == "have a bug":
            raise ZeroDivisionError("planted")


class Fake(EngineActor):
    def __init__(self, name: str) -> None:
        self.name = name
        self.anew()

    def anew(self) -> None:
        self.engine = Told(self.name)

    def tell(self, **steps: str) -> None:
        self.engine.told = steps

    def held(self) -> tuple[str, bool]:
        """Its label, and whether it is paused."""
        return self.engine.label, self.engine.paused

    def calls(self) -> list[str]:
        return self.engine.calls


def start(kind: type, *args: Any, node: str = "", **options: Any) -> Any:
    """An actor, on that node if one is named, restarted when it dies."""
    if node:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    if issubclass(kind, EngineActor):
        options["concurrency_groups"] = GROUPS
    return ray.remote(num_cpus=0, max_restarts=-1, **options)(kind).remote(*args)


def call(actor: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    return get(getattr(actor, method).remote(*args, **kwargs), 120)


def process(actor: Any) -> int:
    return int(call(actor, "__ray_call__", _pid))


def kill(actor: Any) -> int:
    """As `kill -9`: Ray restarts it. Returns when the process is gone."""
    pid = process(actor)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{pid}"), what=f"the end of process {pid}")
    return pid


def is_up(actor: Any) -> bool:
    try:
        return process(actor) > 0
    except ActorUnavailableError:
        return False


def _pid(_: Callable[..., Any]) -> int:
    return os.getpid()
