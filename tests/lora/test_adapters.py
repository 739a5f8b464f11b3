"""The engine side of adapters against replicas that are made up: names, windows, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import pytest
import torch

from ckptsync.engine import StagedVersion
from ckptsync.errors import EngineRefused, EngineUnavailable, InvalidInput, ProofFailed
from ckptsync.manifest import Manifest
from ckptsync.publish import Publisher
from tests.core.manifests import manifest
from tests.lora.models import TinyLM, randomise, with_adapter
from watchers.adapters import AdapterEngine
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine
from watchers.stage import Stage
from watchers.watcher import Watcher


class Replica:
    """Lists what it was told to load; refuses what is in `broken`."""

    def __init__(self, name: str = "a", broken: Iterable[str] = ()) -> None:
        self.name, self.broken = name, set(broken)
        self.loaded: dict[str, str] = {}
        self.calls: list[str] = []
        self.boot = "1"

    def boot_id(self) -> str:
        return self.boot

    def adapters(self) -> Mapping[str, str]:
        return dict(self.loaded)

    def load_adapter(self, name: str, folder: str) -> None:
        self.calls.append(f"load {name}")
        if name in self.broken:
            raise EngineRefused(f"{self.name} does not take {name}")
        self.loaded[name] = folder

    def unload_adapter(self, name: str) -> None:
        self.calls.append(f"unload {name}")
        if "unload" in self.broken:
            raise EngineUnavailable(f"{self.name} does not answer")
        self.loaded.pop(name, None)

    def close(self) -> None:
        pass


def staged(number: int, epoch: int = 1, kind: str = "adapter") -> StagedVersion:
    made: Manifest = msgspec.structs.replace(manifest(), epoch=epoch, number=number, kind=kind)
    return StagedVersion(manifest=made, folder=f"/stage/e{epoch}-v{number}")


def bring(engine: AdapterEngine, version: StagedVersion) -> None:
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    engine.confirm(version)


def test_case_98_each_version_has_a_name_of_its_own_and_is_loaded_before_an_old_one_goes() -> None:
    replica = Replica()
    engine = AdapterEngine([replica], name="policy", staleness=1)
    for number in (1, 2, 3):
        bring(engine, staged(number))
    assert replica.calls == ["load policy@e1-v1", "load policy@e1-v2", "load policy@e1-v3", "unload policy@e1-v1"]
    assert sorted(replica.loaded) == ["policy@e1-v2", "policy@e1-v3"]
    assert engine.status().label == "e1-v3"


def test_going_back_makes_the_older_version_the_one_that_serves_under_its_own_name() -> None:
    replica = Replica()
    engine = AdapterEngine([replica], staleness=1)
    for number in (1, 2):
        bring(engine, staged(number))
    bring(engine, staged(1))
    assert sorted(replica.loaded) == ["adapter@e1-v1", "adapter@e1-v2"]
    bring(engine, staged(2, epoch=2))
    assert engine.status().label == "e2-v2"


def test_when_one_replica_fails_the_others_give_the_adapter_back() -> None:
    good, bad = Replica("good"), Replica("bad", broken=["adapter@e1-v2"])
    engine = AdapterEngine([good, bad])
    bring(engine, staged(1))
    with pytest.raises(EngineRefused, match=r"adapter@e1-v2 was not loaded on every replica: bad does not take"):
        engine.update(staged(2))
    assert sorted(good.loaded) == sorted(bad.loaded) == ["adapter@e1-v1"]
    assert engine.status().label == "e1-v1"
    good.broken.add("unload")
    with pytest.raises(EngineRefused, match=r"it stays loaded, unused, on good"):
        engine.update(staged(2))
    assert engine.status().label == "e1-v1", "a version serves when all replicas have it"


def test_an_adapter_that_is_there_already_is_not_loaded_twice_and_one_from_elsewhere_is_replaced() -> None:
    replica = Replica()
    replica.loaded = {"adapter@e1-v1": "/stage/e1-v1", "adapter@e1-v2": "/gone", "somebody-elses": "/x"}
    engine = AdapterEngine([replica], staleness=2)
    bring(engine, staged(1))
    bring(engine, staged(2))
    assert replica.calls == ["unload adapter@e1-v2", "load adapter@e1-v2"]
    assert "somebody-elses" in replica.loaded


def test_a_replica_that_lost_its_adapters_is_noticed() -> None:
    replicas = [Replica("a"), Replica("b")]
    engine = AdapterEngine(replicas)
    bring(engine, staged(1))
    before = engine.status()
    replicas[1].loaded, replicas[1].boot = {}, "2"
    after = engine.status()
    assert (before.label, after.label) == ("e1-v1", "")
    assert before.boot_id != after.boot_id
    with pytest.raises(ProofFailed, match="b lists adapter@e1-v1 from nowhere"):
        engine.confirm(staged(1))


def test_full_versions_and_senseless_settings_are_refused() -> None:
    engine = AdapterEngine([Replica()])
    with pytest.raises(EngineRefused, match="e1-v1 is a full version"):
        engine.start(staged(1, kind="full"))
    with pytest.raises(InvalidInput, match="at least one"):
        AdapterEngine([])
    with pytest.raises(InvalidInput, match="staleness=-1"):
        AdapterEngine([Replica()], staleness=-1)
    with pytest.raises(InvalidInput, match="'@'"):
        AdapterEngine([Replica()], name="a@b")


@pytest.mark.parametrize("kind", [VllmEngine, SglangEngine])
def test_an_engine_that_follows_full_weights_never_loads_an_adapter_folder_as_weights(kind: type) -> None:
    def nothing(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{request.url} was asked")

    with (
        closing(kind("http://engine", transport=httpx.MockTransport(nothing))) as engine,
        pytest.raises(EngineRefused, match="e1-v1 is a LoRA adapter"),
    ):
        engine.start(staged(1))


def test_a_watcher_follows_adapters_through_a_failure_and_a_resumed_trainer(tmp_path: Path) -> None:
    root, model = str(tmp_path / "root"), with_adapter(TinyLM(), 1, task_type=None)
    good, other = Replica("good"), Replica("other", broken=["policy@e1-v2"])
    engine = AdapterEngine([good, other], name="policy")
    watcher = Watcher(root, engine, stage=Stage(str(tmp_path / "stage"), keep=3), reader="r", events=False)
    with Publisher(root) as publisher:
        for seed in (1, 2):
            randomise(model, seed)
            publisher.publish(model, kind="adapter")
            watcher.step()
    assert (watcher.health.ready, watcher.health.version) == (True, "e1-v1")
    assert sorted(good.loaded) == sorted(other.loaded) == ["policy@e1-v1"]
    with Publisher(root, resumed_from=watcher.channel.resolve("e1-v1").id) as publisher:
        randomise(model, 3)
        publisher.publish(model, kind="adapter")
        watcher.step()
    assert watcher.health.version == "e2-v2"
    assert sorted(good.loaded) == sorted(other.loaded) == ["policy@e1-v1", "policy@e2-v2"]
    watcher.close()
    assert torch.is_tensor(model.base_model.model.embed.weight)
