"""Whom each kind of fault can hit in a world, and how."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .faults import Target, Targets
from .trainers import Trainer
from .victims import Victim
from .world import World

RANKS = {f"trainer rank {number}": number for number in range(2)}


def targets_of(world: World) -> Targets:
    processes = {process.name: process for process in world.processes}
    links = {f"link {name}": host for name, host in world.hosts.items() if host.link}
    slowness = world.net.slowness
    return {
        "kill": {
            **{name: Target(process.kill, process.start) for name, process in processes.items()},
            **{name: Target(partial(_kill, world.trainer, number), _nothing) for name, number in RANKS.items()},
            "store": Target(world.server.kill, world.server.launch),
        },
        "freeze": {
            **{name: _frozen(lambda process=process: process) for name, process in processes.items()},  # type: ignore[misc]
            **{name: _frozen(partial(world.trainer.rank, number)) for name, number in RANKS.items()},
        },
        "cut": {name: Target(host.cut, host.mend) for name, host in links.items()},
        "slow": {name: Target(partial(host.slow, slowness), host.fast) for name, host in links.items() if slowness},
        "fill": {f"disk {name}": Target(each.fill, each.free) for name, each in world.disks.items() if each.small},
        "replace": {"trainer": Target(world.trainer.replace, world.trainer.thaw_replaced)},
    }


def _kill(trainer: Trainer, number: int) -> None:
    trainer.rank(number).kill()


def _nothing() -> None:
    """The launcher starts the ranks again."""


def _frozen(find: Callable[[], Victim]) -> Target:
    """The process that is there when the fault begins is let on, and not one that has taken its place meanwhile."""
    frozen: list[Victim] = []

    def begin() -> None:
        frozen.append(find())
        frozen[-1].freeze()

    return Target(begin, lambda: frozen.pop().thaw())
