"""In-process copies: full weights, adapters and composed engines, on one rank and from sharded ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ckptsync.channel import Channel
from ckptsync.errors import NoTransport, SchemaMismatch
from ckptsync.sync import WeightSync
from ckptsync.transports import Checkpoint, ModuleCopy
from ckptsync.transports.chain import Patience
from ckptsync.transports.targets import Targets
from tests.lora.models import TinyLM, with_adapter
from tests.trainer.models import TinyModel, reference, same, shard
from tests.trainer.ranks_harness import returned, run_ranks
from watchers.engines.composed import ComposedEngine
from watchers.engines.module import ModuleEngine
from watchers.watcher import Watcher

ONCE = Patience(tries=1)


def empty(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model


def full_to_a_dense_sibling(rank: int, root: str) -> Any:
    sibling = empty(TinyModel())
    engine = ModuleEngine(sibling)
    with WeightSync([ModuleCopy()], channel=root, engines=[engine], bucket_bytes=2000) as sync:
        done = sync.sync(shard(TinyModel()), step=1)
    status = engine.status()
    return done.confirmed, status.label, status.paused, {k: v.clone() for k, v in sibling.state_dict().items()}


@pytest.mark.distributed
@pytest.mark.slow
def test_sharded_ranks_each_copy_into_their_own_sibling(tmp_path: Any) -> None:
    for confirmed, label, paused, state in returned(run_ranks(2, full_to_a_dense_sibling, str(tmp_path / "root"))):
        assert (confirmed, label, paused) == (("module",), "e1-v1", False)
        same(state, reference(TinyModel()))


def one_rank_cannot_take_it(rank: int, root: str) -> Any:
    sibling = empty(TinyModel() if rank == 0 else TinyModel(width=16))
    engine = ModuleEngine(sibling)
    with WeightSync([ModuleCopy()], channel=root, engines=[engine]) as sync:
        try:
            sync.sync(shard(TinyModel()))
        except Exception as error:
            return str(error), engine.status().paused, float(sum(t.abs().sum() for t in sibling.state_dict().values()))
    return None


@pytest.mark.distributed
@pytest.mark.slow
def test_a_sibling_that_does_not_fit_on_one_rank_stops_all_before_any_is_touched(tmp_path: Any) -> None:
    told = returned(run_ranks(2, one_rank_cannot_take_it, str(tmp_path / "root")))
    assert told[0] == told[1]
    message, paused, total = told[0]
    assert message.startswith("rank 1: the version does not fit module, track model: ")
    assert "of another shape or dtype (embed.weight, five.weight, layers.0.down.weight, ...)" in message
    assert (paused, total) == (False, 0.0)


class Pair(nn.Module):
    """A composed model: two children in one."""

    def __init__(self) -> None:
        super().__init__()
        self.ar, self.diffusion = TinyModel(blocks=2), TinyModel(blocks=1, tied=False)


PREFIXES = {"ar": "ar.", "diffusion": "diffusion."}


@pytest.fixture
def children() -> dict[str, nn.Module]:
    return {"ar": empty(TinyModel(blocks=2)), "diffusion": empty(TinyModel(blocks=1, tied=False))}


@pytest.fixture
def root(tmp_path: Any) -> str:
    return str(tmp_path / "root")


def test_tracks_are_told_apart_by_prefix_and_applied_together(root: str, children: dict[str, nn.Module]) -> None:
    model, engine = Pair(), ComposedEngine(children)
    with WeightSync([ModuleCopy()], channel=root, engines=[engine], track_prefix=PREFIXES, bucket_bytes=900) as sync:
        done = sync.sync(model)
    assert (done.confirmed, engine.status().version) == (("composed",), done.version)
    for track, child in children.items():
        same(dict(child.state_dict()), reference(getattr(model, track)))


@pytest.mark.parametrize(
    ("prefixes", "reason"),
    [
        ({"ar": "ar.", "vision": "diffusion."}, "has the tracks ar, diffusion, the version ar, vision"),
        ({"ar": "diffusion.", "diffusion": "ar."}, "does not fit composed, track"),
    ],
)
def test_a_prefix_that_is_not_the_engines_is_detected_before_anything_is_touched(
    root: str, children: dict[str, nn.Module], prefixes: dict[str, str], reason: str
) -> None:
    engine = ComposedEngine(children)
    with (
        WeightSync([ModuleCopy(), Checkpoint()], channel=root, engines=[engine], track_prefix=prefixes) as sync,
        pytest.raises(SchemaMismatch, match=reason),
    ):
        sync.sync(Pair())
    assert Channel.open(root).committed() == [], "no other way would do better"
    assert (engine.status().label, engine.status().paused) == ("", False)
    assert not any(tensor.any() for child in children.values() for tensor in child.state_dict().values())


def test_a_param_prefix_that_the_engine_does_not_know_is_detected(root: str) -> None:
    engine = ModuleEngine(TinyModel())
    with (
        WeightSync([ModuleCopy()], channel=root, engines=[engine], param_prefix="policy.") as sync,
        pytest.raises(SchemaMismatch, match=r"missing \(embed.weight, .* unknown to it \(policy.embed.weight, "),
    ):
        sync.sync(TinyModel())


def test_a_copy_that_breaks_off_in_one_child_leaves_all_paused_until_files_bring_all_of_it(
    root: str, children: dict[str, nn.Module], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = Pair(), ComposedEngine(children)
    copy = Targets.copy

    def breaking(self: Targets, track: str, tensors: Iterator[Any]) -> None:
        if track == "diffusion":
            raise RuntimeError("out of memory")
        copy(self, track, tensors)

    options: dict[str, Any] = {"track_prefix": PREFIXES, "patience": ONCE}
    with WeightSync([ModuleCopy(), Checkpoint()], channel=root, engines=[engine], **options) as sync:
        monkeypatch.setattr(Targets, "copy", breaking)
        done = sync.sync(model)
        assert (done.transport, done.dirty, engine.status().label) == ("checkpoint", ("composed",), "")
        assert engine.gate.is_shut
        monkeypatch.undo()
        watcher = Watcher(root, engine, stage=str(tmp_path / "stage"), reader="here", events=False)
        receipt = watcher.step()
        assert receipt is not None
        assert (receipt.state, engine.status().label, engine.gate.is_shut) == ("serving", "e1-v1", False)
        for track, child in children.items():
            same(dict(child.state_dict()), reference(getattr(model, track)))
        done = sync.sync(model)
        assert (done.transport, done.dirty, str(sync.version)) == ("module", (), "e1-v2")
        watcher.close()


def test_with_no_files_behind_it_a_copy_that_breaks_off_is_one_error_and_a_full_resend_makes_it_whole(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sibling = TinyModel()
    engine = ModuleEngine(empty(sibling))
    with WeightSync([ModuleCopy()], channel=root, engines=[engine], patience=ONCE) as sync:
        monkeypatch.setattr(Targets, "check_complete", lambda self: 1 / 0)
        with pytest.raises(NoTransport, match="mixed: module"):
            sync.sync(TinyModel())
        monkeypatch.undo()
        assert (engine.gate.is_shut, engine.status().label, sync.version) == (True, "", None)
        assert sync.sync(TinyModel()).confirmed == ("module",)
    same(dict(sibling.state_dict()), reference(TinyModel()))


def test_an_adapters_tensors_go_into_the_sibling_of_the_same_adapter(root: str) -> None:
    trained, sibling = (with_adapter(TinyLM(), seed, task_type=None) for seed in (1, 2))
    base = {name: t.clone() for name, t in sibling.state_dict().items() if "lora" not in name}
    engine = ModuleEngine(sibling)
    with WeightSync([ModuleCopy()], channel=root, engines=[engine], persist_every=1) as sync:
        done = sync.sync(trained, kind="adapter")
        assert done.file.result().manifest.kind == "adapter"
    found = {name: tensor for name, tensor in sibling.state_dict().items() if "lora" in name}
    same(found, {name: tensor for name, tensor in trained.state_dict().items() if "lora" in name})
    same({name: tensor for name, tensor in sibling.state_dict().items() if "lora" not in name}, base)
    assert engine.status().label == "e1-v1"
