"""A real vLLM (CPU) inside a Ray actor is brought forward and back between rollouts, by files and by broadcast."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import ray

from ckptsync.export.source import CheckpointSource
from ckptsync.sync import WeightSync
from ckptsync.transports import VllmGloo
from tests.live.versions import folders
from tests.watcher.publish_folder import publish_folder
from watchers.ray import GROUPS, RayEngine, ask, by_node, open_board, watch

from .actors import call
from .vllm_actor import VllmRollout, environment

__all__ = ["folders"]

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_vllm_in_an_actor_serves_each_version_and_says_which_whichever_way_it_came(
    nodes: list[str], folders: dict[str, str], tmp_path: Any
) -> None:
    root = str(tmp_path / "root")
    remote: Any = ray.remote(num_cpus=0, concurrency_groups=GROUPS, runtime_env=environment(str(tmp_path)))
    rollout = remote(VllmRollout).remote(folders["a"])
    engines = by_node({"rollout-0": rollout}, start_timeout=600)
    label, base = call(rollout, "rollout")
    assert label == ""
    board = open_board(f"board-{uuid.uuid4().hex[:8]}", root)
    watchers = watch(root, engines, stage=str(tmp_path / "stage"), board=board, poll=600, proof=3)
    seen = {}
    for name in ("b", "a"):
        version = publish_folder(root, folders[name]).id
        board.push(version)
        board.wait_for(version, 300)
        label, seen[name] = call(rollout, "rollout")
        assert label == version.label
    assert seen["a"] == base
    assert seen["b"] != base
    ask(watchers, "load_version", "e1-v1", deadline=300).all()
    assert call(rollout, "rollout") == ("e1-v1", seen["b"])
    ask(watchers, "stop", deadline=60).all()
    engine = RayEngine(rollout, name="rollout-0")
    with WeightSync([VllmGloo(verify=True)], channel=root, engines=[engine], bucket_bytes=1 << 16) as sync:
        for name in ("a", "b"):
            done = sync.sync(CheckpointSource(folders[name]))
            assert (done.transport, done.confirmed, done.failures) == ("vllm_gloo", ("rollout-0",), ())
            assert call(rollout, "rollout") == (done.version.label, seen[name])
            assert engine.version() == sync.version == done.version
    ray.kill(rollout)
