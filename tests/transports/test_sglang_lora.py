"""LoRA adapters by value, into replicas that open them as SGLang does: each TP rank its own copy, and no handle."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import httpx
import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.errors import NoTransport
from ckptsync.export.lora import export_adapter
from ckptsync.sync import WeightSync
from ckptsync.transports import Checkpoint, SglangLora, SglangTensor
from ckptsync.transports.chain import Patience
from tests.lora.models import TinyLM, randomise, with_adapter
from tests.transports.receivers import FileDevices, TransferSglang, TransferVllm
from tests.transports.sends import same
from watchers.adapters import AdapterEngine
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.vllm import VllmEngine
from watchers.watcher import Watcher

LOAD = "POST /load_lora_adapter_from_tensors"
QUICK = Patience(tries=2, wait=0.01)


@pytest.fixture
def servers() -> list[TransferSglang]:
    """Two replicas, of TP 2 and TP 1."""
    return [TransferSglang(["cpu", "cpu"]), TransferSglang(["cpu"])]


@pytest.fixture
def engine(servers: list[TransferSglang]) -> AdapterEngine:
    options = SglangOptions(timeout=5.0, attempts=1)
    replicas = [
        SglangEngine(f"http://127.0.0.1:{at}", options, transport=s.transport) for at, s in enumerate(servers, 1)
    ]
    return AdapterEngine(replicas, name="policy", staleness=1)


@pytest.fixture
def model() -> Any:
    return with_adapter(TinyLM(), 1, task_type=None)


def a_sync(root: Any, engine: Any, *transports: Any, **options: Any) -> WeightSync:
    return WeightSync(transports, channel=str(root), engines=[engine], patience=QUICK, **options)


def test_remote_lora_reaches_every_tp_rank_of_every_replica_under_its_versions_name(tmp_path, engine, servers, model):
    with a_sync(tmp_path, engine, SglangLora(verify=True), bucket_bytes=1) as sync:
        for seed in (1, 2, 3):
            randomise(model, seed)
            done = sync.sync(model, kind="adapter")
            assert (done.transport, done.confirmed) == ("sglang_lora", (engine.name,))
            assert engine.version() == done.version == sync.version
            for server in servers:
                assert same(server.adapters[f"policy@{done.version}"], export_adapter(model).tensors)
                assert server.config == json.loads(export_adapter(model).config)
    assert [sorted(server.adapters) for server in servers] == [["policy@e1-v2", "policy@e1-v3"]] * 2, "one older stays"
    assert not any("POST /pause_generation" in server.seen for server in servers)
    assert servers[0].updates[0]["expected_checksums"].keys() == export_adapter(model).tensors.keys()


def test_its_watcher_does_not_load_from_files_what_came_by_value(tmp_path, engine, servers, model):
    Channel.create(str(tmp_path / "root"))
    watcher = Watcher(str(tmp_path / "root"), engine, stage=str(tmp_path / "stage"), reader="r", events=False)
    with a_sync(tmp_path / "root", engine, SglangLora(), persist_every=2) as sync, closing(watcher):
        for files in (False, True, False, True):
            done = sync.sync(model, kind="adapter")
            assert (done.file is not None) == files
            if done.file:
                done.file.result()
            watcher.step()
            assert (watcher.health.version, watcher.health.ready) == (done.version.label, True)
    assert not any("POST /load_lora_adapter" in server.seen for server in servers)


def test_an_answer_that_was_lost_is_not_sent_again(tmp_path, engine, servers, model):
    def late() -> Any:
        servers[1].answers.clear()
        servers[1]._load_adapter(json.loads(servers[1].requests[-1].content))
        return httpx.ReadTimeout("late")

    servers[1].answers[LOAD] = late
    with a_sync(tmp_path, engine, SglangLora()) as sync:
        done = sync.sync(model, kind="adapter")
    assert (done.transport, done.confirmed, len(done.failures)) == ("sglang_lora", (engine.name,), 1)
    assert [server.seen.count(LOAD) for server in servers] == [1, 1]


@pytest.mark.parametrize(
    "answer",
    [(400, {"success": False, "error_message": "rank 16"}), httpx.ReadTimeout("late"), (200, {"success": True})],
    ids=["refused", "timed out", "loaded in words only"],
)
def test_what_one_replica_does_not_take_is_no_version_and_the_one_before_serves_on(
    tmp_path, engine, servers, model, answer
):
    with a_sync(tmp_path, engine, SglangLora(), Checkpoint()) as sync:
        sync.sync(model, kind="adapter")
        servers[1].answers[LOAD] = answer
        done = sync.sync(model, kind="adapter")
        assert (done.transport, done.dirty, done.behind) == ("checkpoint", (), {engine.name: "e1-v1"})
        assert [str(version) for version in Channel.open(str(tmp_path)).versions()] == ["e1-v2"]
        servers[1].answers.clear()
        done = sync.sync(model, kind="adapter")
        assert (done.transport, done.behind) == ("sglang_lora", {})
    assert engine.version() == done.version


def test_an_adapter_that_no_fast_path_carries_is_told_so_and_pauses_nobody(tmp_path, model):
    server = TransferVllm(["GPU-0"])
    engine = VllmEngine("http://127.0.0.1:1", transport=server.transport)
    tensor = SglangTensor(devices=FileDevices(str(tmp_path), "GPU-0"))
    with a_sync(tmp_path / "root", engine, tensor, Checkpoint()) as sync:
        done = sync.sync(model, kind="adapter")
    assert (done.transport, [f.phase for f in done.failures]) == ("checkpoint", ["probe"])
    assert "merge_lora=True folds it in" in done.failures[0].message
    assert not [call for call in server.seen if call.startswith("POST")]


def test_probe_says_why_an_engine_does_not_take_adapters_by_value(engine, servers, model, tmp_path):
    lora = SglangLora()
    assert lora.probe([engine]) is None
    assert "use AdapterEngine" in str(lora.probe([engine.replicas[0]]))
    servers[1].arguments["enable_lora"] = False
    assert str(lora.probe([engine])).endswith("was started without --enable-lora")
    servers[1].arguments |= {"enable_lora": True, "dp_size": 2}
    assert "dp_size=2" in str(lora.probe([engine]))
    vllm = VllmEngine("http://127.0.0.1:1", transport=TransferVllm(["GPU-0"]).transport)
    assert "vLLM takes adapters from files, or merge_lora=True" in str(lora.probe([AdapterEngine([vllm])]))
    with a_sync(tmp_path, engine, lora) as sync, pytest.raises(NoTransport, match="it carries adapters"):
        sync.sync({"w": torch.zeros(4)})


def test_a_tensor_that_lies_odd_is_carried_by_value(tmp_path, engine, servers, model):
    with torch.no_grad():
        layer = next(m for m in model.modules() if hasattr(m, "lora_A") and "default" in m.lora_A)
        layer.lora_A["default"].weight = torch.nn.Parameter(layer.lora_A["default"].weight.T.contiguous().T)
    with a_sync(tmp_path, engine, SglangLora(), dtype=torch.bfloat16) as sync:
        done = sync.sync(model, kind="adapter")
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in export_adapter(model).tensors.items()}
    assert same(servers[1].adapters[f"policy@{done.version}"], expected)
