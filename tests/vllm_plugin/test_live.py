"""One rank's model between versions, on toys: what an outcome says is what the model holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from ckptsync.shards.tensors import spec_of
from tests.vllm_plugin.toys import Toy, checkpoint, equal, state
from tests.watcher.publish_folder import publish_folder
from watchers.stage import Stage
from watchers.vllm_plugin.live import EngineSide, LiveModel, Weights
from watchers.vllm_plugin.payload import Payload

Stager = Callable[[dict[str, torch.Tensor]], StagedVersion]


@pytest.fixture
def stage(tmp_path: Any) -> Stager:
    def staged(tensors: dict[str, torch.Tensor]) -> StagedVersion:
        folder = tmp_path / f"v{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        manifest = publish_folder(str(tmp_path / "root"), str(folder))
        return Stage(str(tmp_path / "stage"), keep=100).stage(Channel.open(str(tmp_path / "root")), manifest)

    return staged


class Rig:
    """A toy that was started on checkpoint 1, with an engine whose reload can be broken."""

    def __init__(self) -> None:
        self.model, self.broken = Toy(), 0
        self.model.load_weights(iter(checkpoint(1).items()))
        self.why_not = ""
        self.live = LiveModel(
            self.model,
            EngineSide(
                reload=self.reload,
                base=lambda: iter(checkpoint(1).items()),
                schema=lambda: {name: spec_of(name, tensor) for name, tensor in checkpoint(1).items()},
                unplannable=lambda: self.why_not,
            ),
        )

    def reload(self, weights: Weights) -> None:
        if not self.broken:
            self.model.load_weights(weights)
            return
        self.broken -= 1
        self.model.qkv.data.fill_(9)
        raise OSError("planted")

    def holds(self, seed: int) -> bool:
        reference = Toy()
        reference.load_weights(iter(checkpoint(seed).items()))
        return equal(state(self.model), state(reference))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_failed_first_update_goes_back_to_the_weights_of_the_start(rig: Rig, stage: Stager) -> None:
    rig.broken = 1
    outcome = rig.live.update(stage(checkpoint(2)))
    assert (outcome.state, outcome.path, outcome.proof) == ("restored", "reload", "none")
    assert rig.holds(1)


def test_a_rollback_that_fails_too_is_dirty_until_a_whole_load(rig: Rig, stage: Stager) -> None:
    rig.live.update(stage(checkpoint(2)))
    rig.live._plan = None
    rig.broken = 2
    outcome = rig.live.update(stage(checkpoint(3)))
    assert outcome.state == "dirty"
    assert outcome.error is not None
    assert outcome.error.kind == "engine-dirty"
    without = checkpoint(3)
    del without["norm.weight"]
    assert rig.live.update(stage(without)).state == "dirty"  # refused, and no better for that
    after = rig.live.update(stage(checkpoint(3)))
    assert (after.state, after.path) == ("loaded", "reload")
    assert rig.holds(3)
    assert rig.live.update(stage(checkpoint(2))).path == "plan"
    assert rig.holds(2)


def test_what_the_engine_holds_beside_its_parameters_rules_the_plan_out(rig: Rig, stage: Stager) -> None:
    rig.why_not = "a kernel packed it"
    for seed in (2, 3):
        outcome = rig.live.update(stage(checkpoint(seed)))
        assert (outcome.state, outcome.path, outcome.proof) == ("loaded", "reload", "none")
    assert "a kernel packed it" in outcome.why


def test_another_dtype_takes_the_engines_own_reload_once(rig: Rig, stage: Stager) -> None:
    rig.live.update(stage(checkpoint(2)))
    outcome = rig.live.update(stage(checkpoint(3, torch.float32)))
    assert (outcome.state, outcome.path, outcome.proof) == ("loaded", "reload", "elements")
    assert "other dtypes" in outcome.why
    assert rig.live.update(stage(checkpoint(2, torch.float32))).path == "plan"
    assert rig.holds(2)


def test_without_pinned_memory_the_engines_own_reload_does_it(
    rig: Rig, stage: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    rig.live.update(stage(checkpoint(2)))
    monkeypatch.setattr(Payload, "of", no_memory)
    outcome = rig.live.update(stage(checkpoint(3)))
    assert (outcome.state, outcome.path) == ("loaded", "reload")
    assert "out of memory" in outcome.why
    assert rig.holds(3)


def test_what_was_prepared_is_what_is_loaded_and_proven_by_sums(
    rig: Rig, stage: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.live.update(stage(checkpoint(2)))
    monkeypatch.setattr(LiveModel, "_on_cuda", lambda _: True)  # without a GPU, pinned memory is plain memory
    version, ready = stage(checkpoint(3)), threading.Event()
    rig.live.prepare(version, ready.set)
    assert ready.wait(10)
    assert rig.holds(2)
    outcome = rig.live.update(version)
    assert (outcome.state, outcome.path, outcome.proof) == ("loaded", "plan", "sums")
    assert rig.holds(3)


def test_another_version_than_the_prepared_one_may_be_loaded(
    rig: Rig, stage: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.live.update(stage(checkpoint(2)))
    monkeypatch.setattr(LiveModel, "_on_cuda", lambda _: True)
    ready = threading.Event()
    rig.live.prepare(stage(checkpoint(3)), ready.set)
    outcome = rig.live.update(stage(checkpoint(4)))
    assert (outcome.state, outcome.path) == ("loaded", "plan")
    assert rig.holds(4)


def test_a_version_that_cannot_be_prepared_is_refused_by_its_update(
    rig: Rig, stage: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.live.update(stage(checkpoint(2)))
    monkeypatch.setattr(LiveModel, "_on_cuda", lambda _: True)
    tensors = checkpoint(3)
    del tensors["attn.q.weight"]
    version, ready = stage(tensors), threading.Event()
    rig.live.prepare(version, ready.set)
    assert ready.wait(10)
    outcome = rig.live.update(version)
    assert outcome.state == "refused"
    assert "attn.q.weight" in str(outcome.error)
    assert rig.holds(2)
