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
from tests.live.toys import Toy, checkpoint, equal, state
from tests.watcher.publish_folder import publish_folder
from watchers.live import changes
from watchers.live.model import EngineSide, LiveModel, Weights
from watchers.live.outcome import Outcome
from watchers.live.payload import Payload
from watchers.stage import Stage

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
        self.model, self.broken, self.lost = Toy(), 0, ""
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
            self.model.load_weights((name, tensor) for name, tensor in weights if name != self.lost)
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


def test_a_reload_that_silently_leaves_a_tensor_old_is_found_once_a_plan_was_proven(rig: Rig, stage: Stager) -> None:
    assert rig.live.update(stage(checkpoint(2))).proof == "elements"
    rig.live._plan = None  # as after a failed proof: the engine's own reload is next
    rig.lost = "norm.weight"
    outcome = rig.live.update(stage(checkpoint(3)))
    assert (outcome.state, outcome.path) == ("restored", "reload")
    assert outcome.error is not None
    assert outcome.error.kind == "proof-failed"
    assert "norm.weight" in str(outcome.error)


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
    assert ready.wait(60)
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
    assert ready.wait(60)
    outcome = rig.live.update(version)
    assert outcome.state == "refused"
    assert "attn.q.weight" in str(outcome.error)
    assert rig.holds(2)


def test_what_somebody_else_wrote_is_kept_by_a_refusal_and_never_restored(rig: Rig, stage: Stager) -> None:
    """A trainer's broadcast leaves no files to go back to."""
    rig.why_not = "no plan here"
    assert rig.live.update(stage(checkpoint(2))).state == "loaded"
    rig.live.overwrite()
    rig.model.load_weights(iter(checkpoint(3).items()))
    rig.live.overwritten()
    wrong = checkpoint(4)
    del wrong["norm.weight"]
    assert rig.live.update(stage(wrong)).state == "refused"
    assert rig.holds(3)
    rig.broken = 1
    outcome = rig.live.update(stage(checkpoint(5)))
    assert (outcome.state, "no files" in str(outcome.error)) == ("dirty", True)
    assert rig.live.update(stage(checkpoint(6))).state == "loaded"
    assert rig.holds(6)


class Pinned:
    """A rig whose payload is gathered as on a GPU; after two loads the model holds what that payload holds."""

    def __init__(self, rig: Rig, stage: Stager) -> None:
        self.rig, self.live, self.stage, self.tensors = rig, rig.live, stage, checkpoint(2)
        self.live.update(stage(self.tensors))
        assert self.next().moved is None
        assert self.next().moved is not None

    def version(self) -> StagedVersion:
        """One more, of which one element changed."""
        self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.tensors["attn.k.weight"].view(-1)[7] += 1
        return self.stage(self.tensors)

    def prepare(self, version: StagedVersion) -> StagedVersion:
        ready = threading.Event()
        self.live.prepare(version, ready.set)
        assert ready.wait(60)
        return version

    def next(self) -> Outcome:
        outcome = self.live.update(self.prepare(self.version()))
        assert outcome.state == "loaded"
        assert "everything was copied" not in outcome.why
        assert self.holds_the_last()
        return outcome

    def holds_the_last(self) -> bool:
        reference = Toy()
        reference.load_weights(iter(self.tensors.items()))
        return equal(state(self.rig.model), state(reference))


@pytest.fixture
def pinned(rig: Rig, stage: Stager, monkeypatch: pytest.MonkeyPatch) -> Pinned:
    monkeypatch.setattr(LiveModel, "_on_cuda", lambda _: True)  # without a GPU, pinned memory is plain memory
    monkeypatch.setattr(changes, "SMALL", 0)
    return Pinned(rig, stage)


def test_only_what_changed_is_moved_from_the_third_load_on(pinned: Pinned) -> None:
    outcome = pinned.next()
    assert (outcome.path, outcome.proof, outcome.why) == ("plan", "sums", "")
    assert outcome.moved == 16  # a place of 4 bytes and a value of 2, each in 8
    assert pinned.live.update(pinned.version()).moved == 16  # gathered in the pause
    assert pinned.holds_the_last()


def test_after_a_prepared_version_that_was_never_loaded_everything_is_moved_once(pinned: Pinned) -> None:
    pinned.prepare(pinned.version())
    assert pinned.next().moved is None
    assert pinned.next().moved == 16


def test_the_same_version_again_is_moved_whole(pinned: Pinned) -> None:
    version = pinned.prepare(pinned.version())
    assert pinned.live.update(version).moved == 16
    pinned.rig.model.norm.data.fill_(9)
    outcome = pinned.live.update(pinned.prepare(version))
    assert (outcome.moved, outcome.why) == (None, "")
    assert pinned.holds_the_last()


def test_after_a_load_that_failed_everything_is_moved_once(pinned: Pinned) -> None:
    version = pinned.prepare(pinned.version())
    assert pinned.live._payload._ready is not None
    assert pinned.live._payload._ready.expected is not None
    pinned.live._payload._ready.expected[0] ^= 1
    assert pinned.live.update(version).state == "restored"
    assert pinned.next().path == "reload"
    assert pinned.next().moved is None
    assert pinned.next().moved == 16


def test_after_a_fast_path_wrote_to_the_model_everything_is_moved_once(pinned: Pinned) -> None:
    version = pinned.prepare(pinned.version())
    pinned.live.overwrite()
    pinned.rig.model.load_weights(iter(checkpoint(7).items()))
    pinned.live.overwritten()
    outcome = pinned.live.update(version)
    assert (outcome.state, outcome.moved, outcome.why) == ("loaded", None, "")
    assert pinned.next().moved == 16


def test_after_a_reload_and_with_its_new_plan_everything_is_moved_once(pinned: Pinned) -> None:
    pinned.tensors = {name: tensor.float() for name, tensor in pinned.tensors.items()}
    assert pinned.next().path == "reload"
    assert pinned.next().moved is None
    assert pinned.next().moved == 16


def test_weights_that_somebody_changed_unsaid_cost_a_whole_copy_and_not_the_version(pinned: Pinned) -> None:
    version = pinned.prepare(pinned.version())
    pinned.rig.model.norm.data.fill_(9)
    outcome = pinned.live.update(version)
    assert (outcome.state, outcome.path, outcome.moved) == ("loaded", "plan", None)
    assert "norm.weight" in outcome.why
    assert pinned.holds_the_last()


def test_weights_that_moved_after_a_version_was_prepared_are_written_where_they_are_now(pinned: Pinned) -> None:
    version = pinned.prepare(pinned.version())
    norm = pinned.rig.model.norm
    norm.data = norm.data.clone()
    assert pinned.live.update(version).state == "loaded"
    assert pinned.holds_the_last()
