"""A torch module in this process as an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable, InvalidInput, ProofFailed, SchemaMismatch
from ckptsync.manifest import TensorSpec
from watchers.engines.module import ModuleEngine
from watchers.stage import Stage
from watchers.watcher import Watcher

from .publish import TestPublisher


class Tiny(nn.Module):
    """Tied ends, a persistent buffer, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(4), persistent=False)


SPECS = [
    TensorSpec("embed.weight", "F32", (16, 8)),
    TensorSpec("norm.weight", "F32", (8,)),
    TensorSpec("norm.bias", "F32", (8,)),
    TensorSpec("norm.running_mean", "F32", (8,)),
    TensorSpec("norm.running_var", "F32", (8,)),
    TensorSpec("norm.num_batches_tracked", "I64", ()),
]
TIES = {"head.weight": "embed.weight"}


@pytest.fixture
def staged(root: str, tmp_path: Any) -> Callable[..., StagedVersion]:
    publisher, stage = TestPublisher(root), Stage(str(tmp_path / "stage"), keep=9)

    def publish(seed: int | None = None, **options: Any) -> StagedVersion:
        manifest = publisher.publish(seed, **{"specs": SPECS, "aliases": TIES, **options})
        return stage.stage(Channel.open(root), manifest)

    return publish


def load(engine: ModuleEngine, version: StagedVersion) -> str:
    engine.pause()
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    confirmation = engine.confirm(version)
    engine.resume()
    return confirmation.fingerprint


def test_the_schema_is_the_state_dict_with_ties_once() -> None:
    assert list(ModuleEngine(Tiny()).schema().values()) == SPECS


def test_a_module_without_values_is_refused_where_the_engine_is_made_or_at_the_next_look(
    tmp_path: Path,
) -> None:
    with pytest.raises(EngineRefused, match=r"'weight' cannot be written: it is on the meta device .*; materialize it"):
        ModuleEngine(nn.Linear(4, 4, device="meta"))
    TestPublisher(str(tmp_path / "root")).publish()
    engine = ModuleEngine(Tiny())
    watcher = Watcher(str(tmp_path / "root"), engine, stage=str(tmp_path / "stage"), events=False)
    engine.module.to("meta")
    assert watcher.step() is None
    assert "materialize it first" in watcher.health.reason
    watcher.close()


def test_what_is_no_module_and_what_is_no_engine_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"an engine is made of a torch\.nn\.Module, not of NoneType"):
        ModuleEngine(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="Tiny is no engine: give an adapter"):
        Watcher(str(tmp_path), Tiny(), stage=str(tmp_path / "stage"))  # type: ignore[arg-type]


def test_it_loads_in_place_and_keeps_ties(staged: Callable[..., StagedVersion]) -> None:
    module = Tiny()
    engine, place = ModuleEngine(module), module.embed.weight.data_ptr()
    before = module.embed.weight.detach().clone()
    version = staged()
    load(engine, version)
    assert module.embed.weight.data_ptr() == module.head.weight.data_ptr() == place
    assert not torch.equal(module.embed.weight, before)
    assert engine.status().label == version.label


def test_equal_weights_have_equal_fingerprints_and_others_have_others(
    staged: Callable[..., StagedVersion],
) -> None:
    engine, first, second = ModuleEngine(Tiny()), staged(seed=1), staged(seed=2)
    prints = [load(engine, version) for version in (first, second, first, staged(seed=1))]
    assert prints[0] == prints[2] == prints[3] != prints[1]


def test_equal_weights_have_equal_fingerprints_in_whichever_order_their_trainers_wrote_them(
    staged: Callable[..., StagedVersion],
) -> None:
    engine, version = ModuleEngine(Tiny()), staged(seed=1)
    track = version.manifest.tracks["model"]
    backwards = msgspec.structs.replace(track, tensors=track.tensors[::-1])
    other = StagedVersion(
        manifest=msgspec.structs.replace(version.manifest, tracks={"model": backwards}), folder=version.folder
    )
    assert load(engine, version) == load(engine, other)


def test_confirm_reads_the_live_tensors_back_and_names_the_one_that_differs(
    staged: Callable[..., StagedVersion],
) -> None:
    module = Tiny()
    engine, version = ModuleEngine(module), staged()
    load(engine, version)
    with torch.no_grad():
        module.norm.bias.view(torch.uint8)[5] ^= 1  # one bit
    with pytest.raises(ProofFailed, match=r"norm.bias is not the one of e1-v1"):
        engine.confirm(version)


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        (SPECS[:-1], "norm.num_batches_tracked"),
        ([*SPECS, TensorSpec("norm.extra", "F32", (1,))], "norm.extra"),
        (
            [TensorSpec("embed.weight", "F32", (16, 9)), *SPECS[1:]],
            "embed.weight 16x9 but the engine has 16x8",
        ),
        (
            [TensorSpec("embed.weight", "BF16", (16, 8)), *SPECS[1:]],
            "embed.weight BF16 but the engine has F32",
        ),
    ],
)
def test_case_93_what_does_not_fit_is_refused_before_anything_is_touched(
    staged: Callable[..., StagedVersion], specs: list[TensorSpec], reason: str
) -> None:
    module = Tiny()
    engine, before = ModuleEngine(module), {k: v.clone() for k, v in module.state_dict().items()}
    version = staged(specs=specs)
    engine.pause()
    with pytest.raises(SchemaMismatch, match=reason):
        engine.start(version)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_with_allow_cast_floats_are_cast(staged: Callable[..., StagedVersion]) -> None:
    module = Tiny()
    engine = ModuleEngine(module, allow_cast=True)
    half = [TensorSpec(s.name, "BF16", s.shape) if s.dtype == "F32" else s for s in SPECS]
    assert load(engine, staged(specs=half))
    assert module.embed.weight.dtype == torch.float32


def test_a_file_that_is_lost_in_mid_load_leaves_it_dirty_and_without_a_label(
    staged: Callable[..., StagedVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, good, bad = ModuleEngine(Tiny()), staged(), staged()
    load(engine, good)
    monkeypatch.setattr("watchers.engines.module.map_tensors", lambda *_: iter(()))
    engine.pause()
    engine.start(bad)
    with pytest.raises(EngineDirty, match="gave nothing for"):
        engine.update(bad)
    assert engine.status().label == ""


def test_it_is_loaded_only_while_paused(staged: Callable[..., StagedVersion]) -> None:
    with pytest.raises(EngineRefused, match="not paused"):
        ModuleEngine(Tiny()).start(staged())


def test_a_pause_waits_for_computations_and_holds_new_ones() -> None:
    engine, inside, leave, order = ModuleEngine(Tiny()), threading.Event(), threading.Event(), []

    def first() -> None:
        with engine.gate:
            inside.set()
            leave.wait(60)
            order.append("first")

    def second() -> None:
        with engine.gate:
            order.append("second")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    inside.wait(60)
    threads.append(threading.Thread(target=lambda: (engine.pause(), order.append("paused"))))
    threads[1].start()
    leave.set()
    threads[1].join(60)
    threads.append(threading.Thread(target=second))
    threads[2].start()
    assert order == ["first", "paused"]
    engine.resume()
    for thread in threads:
        thread.join(60)
    assert order == ["first", "paused", "second"]


def test_a_pause_that_takes_too_long_fails_and_lets_computations_go_on() -> None:
    engine = ModuleEngine(Tiny(), pause_seconds=0.01)
    with engine.gate, pytest.raises(EngineUnavailable, match="still computing"):
        engine.pause()
    with engine.gate:
        assert not engine.status().paused


def test_a_watcher_keeps_a_module_current(root: str, tmp_path: Any) -> None:
    publisher, module = TestPublisher(root), Tiny()
    watcher = Watcher(root, ModuleEngine(module), stage=str(tmp_path / "stage"), reader="module", events=False)
    for _ in range(2):
        manifest = publisher.publish(specs=SPECS, aliases=TIES)
        receipt = watcher.step()
        assert receipt is not None
        assert receipt.label == manifest.id.label
    watcher.close()


def test_a_module_that_is_no_language_model_cannot_be_scored() -> None:
    with pytest.raises(EngineRefused, match="cannot score tokens"):
        ModuleEngine(Tiny()).score([1, 2, 3], 1)


def test_values_that_were_cast_do_not_count_as_read_back(staged: Callable[..., StagedVersion]) -> None:
    version = staged()
    for module, compared in ((Tiny(), True), (Tiny().half(), False)):
        engine = ModuleEngine(module, allow_cast=True)
        load(engine, version)
        assert engine.confirm(version).read_back is compared
