"""A watcher on each node, for the engines there: placed by Ray, restarted by Ray, one stage for the node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ckptsync.engine import Engine
from watchers.health import Health, Receipt

from .board import Board
from .calls import ask, get
from .engine import RayEngine
from .node_watch import NodeWatch

Connect = Callable[[], Engine]
"""Makes the adapter to an engine, in the watcher's process: `partial(VllmEngine, "http://127.0.0.1:8000")`."""

ALWAYS: Mapping[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 16}
"""Options of each WatcherActor, unless `watch` is told others."""


class WatcherActor:
    """Keeps the engines of its node on the channel's versions: a Fleet, which has a Watcher for each. Made by `watch`.

    It begins by itself, also after Ray has restarted it: a loop in the background looks, stages, loads and proves, and
    tells the board what its engines serve. An engine that outlived its watcher is asked what it serves. A bug that ends
    the loop ends the process, for Ray to restart.
    """

    def __init__(self, make: Callable[[], NodeWatch]) -> None:
        self._make, self._watch = make, make()

    def run(self) -> None:
        """Begin again after `stop`. Idempotent."""
        if self._watch.stopped:
            self._watch = self._make()

    def health(self) -> Mapping[str, Health]:
        """Of each engine, by name; from memory."""
        return self._watch.health()

    def load_version(self, label: str) -> Receipt:
        """Load this version on every engine of the node and stay on it; `latest` follows again. Waits for the load.

        Raises what `Fleet.load_version` does.
        """
        return self._watch.fleet.load_version(label)

    def wake(self) -> None:
        """Look at the store now."""
        self._watch.fleet.wake()

    def stop(self) -> None:
        """End the loop after what it is at, and wait for it. The engines serve on, and leave the board."""
        self._watch.stop()


def node_of(actor: ActorHandle[Any], *, timeout: float = 60.0) -> str:
    """The id of the node where the actor runs. Waits for it to start; Ray's GetTimeoutError or RayActorError."""
    return get(actor.__ray_call__.remote(_node_here), timeout)


def by_node(
    actors: Mapping[str, ActorHandle[Any]], *, timeout: float = 60.0, start_timeout: float = 600.0
) -> dict[str, dict[str, Connect]]:
    """Engines in actors (EngineActor), for `watch`: node id -> name -> RayEngine, which is given `timeout`.

    Waits for the actors to start; PartialFailure if one is not there within `start_timeout` seconds.
    """
    nodes = ask(actors, "__ray_call__", _node_here, deadline=start_timeout).all()
    found: dict[str, dict[str, Connect]] = defaultdict(dict)
    for name, actor in actors.items():
        connect = partial(RayEngine, actor, name=name, timeout=timeout)
        connect()  # refused here, and not in the watcher's process
        found[nodes[name]][name] = connect
    return dict(found)


def watch(
    root: str,
    engines: Mapping[str, Mapping[str, Connect]],
    *,
    stage: str,
    board: Board | None = None,
    poll: float = 5.0,
    actor: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, ActorHandle[Any]]:
    """Start a WatcherActor on each node of `engines` (node id -> name -> Connect); node id -> actor.

    `stage`    folder on every node, shared by all its watchers; an engine's name is unique in it
    `board`    where to hear of versions, and to say what is served; without one, only `poll` finds them
    `poll`     seconds between looks at store and engines while the board says nothing
    `actor`    Ray's options for each actor, such as `{"num_cpus": 1}`; by default it takes no CPU and always restarts
    `options`  those of Fleet, and `proof`, `trusted`, `allow_cast` and `yields` of Watcher

    An actor is bound to its node and ends with it. Keep the handles: an actor ends with the last one.
    """
    started: dict[str, Any] = {}
    for node, here in engines.items():
        given = {"stage": stage, "reader": f"ray-{node[:12]}", "board": board, "poll": poll, **options}
        make = partial(NodeWatch, root, here, **given)
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        started[node] = (
            ray.remote(WatcherActor).options(**{**ALWAYS, "scheduling_strategy": place, **(actor or {})}).remote(make)
        )
    return started


def _node_here(_: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())
