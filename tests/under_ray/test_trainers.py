"""Trainer ranks as actors of two nodes: they meet, publish together, and send to engines that live in actors."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

import ckptsync
from ckptsync.errors import EngineRefused
from ckptsync.shards.tensors import load_tensors
from ckptsync.transports import Checkpoint, Gloo, Patience
from ckptsync.transports.targets import Targets
from tests.trainer.models import TinyModel, reference, shard
from tests.trainer.models import same as equal
from tests.transports.sends import Small, same, weights
from tests.waiting import until
from watchers.engines.module import ModuleEngine
from watchers.ray import Board, EngineActor, RayEngine, ask, meet_at, node_address, open_board
from watchers.watcher import Watcher

from .actors import call, is_up, start

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


class Rollout(EngineActor):
    """Its engine is a torch module. As told, the process dies or the copy breaks at the second bucket."""

    def __init__(self) -> None:
        self.engine = ModuleEngine(Small())

    def told(self, fault: str) -> None:
        copies, copy = iter(range(9)), Targets.copy

        def faulty(self: Targets, track: str, tensors: Iterator[Any]) -> None:
            if next(copies) == 1:
                if fault == "dies":
                    os._exit(1)
                Targets.copy = copy  # type: ignore[method-assign]
                raise OSError("planted")
            copy(self, track, tensors)

        Targets.copy = faulty  # type: ignore[assignment]

    def held(self) -> tuple[str, bool, dict[str, torch.Tensor]]:
        status = self.engine.status()
        return status.label, status.paused, weights(self.engine.module)


class Trainer:
    """One rank."""

    def join(self, url: str, rank: int, size: int) -> None:
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)

    def publish(self, root: str, board: Board, step: int) -> str:
        with ckptsync.Publisher(root) as publisher:
            published = publisher.publish(shard(TinyModel()), step=step)
        if dist.get_rank() == 0:
            board.push(published.version, step=step)
        return published.version.label

    def begin(self, root: str, engines: dict[str, Any]) -> None:
        self.sync = ckptsync.WeightSync(
            [Gloo(host=node_address()), Checkpoint()], channel=root, patience=Patience(tries=1), bucket_bytes=600,
            engines=[RayEngine(actor, name=name) for name, actor in engines.items()], timeout=60,
        )  # fmt: skip

    def send(self, seed: int) -> dict[str, Any]:
        done = self.sync.sync(Small(seed))
        return {
            "version": done.version.label, "by": done.transport, "confirmed": done.confirmed, "dirty": done.dirty,
            "failures": [(f.transport, f.phase, f.touched) for f in done.failures],
        }  # fmt: skip

    def end(self) -> None:
        self.sync.close()


@pytest.fixture(scope="module")
def trainers(nodes: list[str]) -> Iterator[dict[str, Any]]:
    """They have met."""
    found = {f"rank {rank}": start(Trainer, node=node) for rank, node in enumerate(nodes)}
    place = meet_at(found["rank 0"])
    assert place.address == node_address()  # both nodes are of this machine
    ray.get([each.join.remote(place.url, rank, 2) for rank, each in enumerate(found.values())], timeout=120)
    yield found
    for each in found.values():
        ray.kill(each)


@pytest.fixture
def rollouts(nodes: list[str]) -> Iterator[dict[str, Any]]:
    found = {f"rollout-{at}": start(Rollout, node=node) for at, node in enumerate(nodes)}
    yield found
    for each in found.values():
        ray.kill(each)


def test_ranks_that_met_publish_one_version_together(trainers: dict[str, Any], tmp_path: Any) -> None:
    root = str(tmp_path / "root")
    board = open_board(f"board-{uuid.uuid4().hex[:8]}")
    labels = ask(trainers, "publish", root, board, 7, deadline=120).all()
    assert labels == {"rank 0": "e1-v1", "rank 1": "e1-v1"}
    assert board.wait(timeout=60) == ((1, 1), 7)
    manifest = ckptsync.Channel.open(root).latest()
    folder = os.path.join(root, manifest.folder)
    equal(dict(load_tensors(folder, manifest.tracks["model"], verify=True)), reference(TinyModel()))


def send(trainers: dict[str, Any], seed: int) -> dict[str, Any]:
    """What every rank was told."""
    told = ask(trainers, "send", seed, deadline=120).all()
    assert told["rank 0"] == told["rank 1"]
    return dict(told["rank 0"])


def held(rollouts: dict[str, Any], label: str, seed: int) -> bool:
    """Whether all compute with this version, by what is in their modules."""
    found = [call(actor, "held") for actor in rollouts.values()]
    return all(
        (says, paused) == (label, False) and same(tensors, weights(Small(seed))) for says, paused, tensors in found
    )


def load_from_files(rollouts: dict[str, Any], folder: Any) -> None:
    """As the watchers beside them do."""
    for name, actor in rollouts.items():
        until(partial(is_up, actor), seconds=60, what=f"the restart of {name}")
        engine = RayEngine(actor, name=name)
        with closing(Watcher(f"{folder}/root", engine, stage=f"{folder}/stage", reader=name, events=False)) as watcher:
            receipt = watcher.step()
        assert receipt is not None
        assert receipt.state == "serving", receipt.error


def is_half(engine: RayEngine) -> bool:
    """Whether it says that it must not compute, for that reason."""
    with pytest.raises(EngineRefused) as caught:
        engine.resume()
    return "e1-v2 is half received" in str(caught.value)


def test_trainers_in_actors_send_to_engines_in_actors_and_files_take_over_what_breaks_off(
    trainers: dict[str, Any], rollouts: dict[str, Any], tmp_path: Any
) -> None:
    both = tuple(rollouts)
    ask(trainers, "begin", str(tmp_path / "root"), rollouts, deadline=120).all()
    told = send(trainers, 1)
    assert (told["version"], told["by"], told["confirmed"], told["failures"]) == ("e1-v1", "gloo", both, [])
    assert held(rollouts, "e1-v1", 1)

    call(rollouts[both[1]], "told", "breaks")
    told = send(trainers, 2)
    assert (told["version"], told["by"], told["dirty"]) == ("e1-v2", "checkpoint", both)
    assert told["failures"] == [("gloo", "bucket", both)]
    for name, actor in rollouts.items():
        until(partial(is_half, RayEngine(actor, name=name)), seconds=30, what="the end of its wait for the rest")
    load_from_files(rollouts, tmp_path)
    assert held(rollouts, "e1-v2", 2)

    call(rollouts[both[1]], "told", "dies")
    told = send(trainers, 3)
    assert (told["version"], told["by"], told["failures"]) == ("e1-v3", "checkpoint", [("gloo", "bucket", both)])
    load_from_files(rollouts, tmp_path)
    assert held(rollouts, "e1-v3", 3)
    told = send(trainers, 4)
    assert (told["version"], told["by"], told["confirmed"], told["failures"]) == ("e1-v4", "gloo", both, [])
    assert held(rollouts, "e1-v4", 4)
    ask(trainers, "end", deadline=60).all()
