"""The fast transports to a real SGLang on CPUs: its tensor path through shared memory, its group update over gloo."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ckptsync.engine import StagedVersion
from ckptsync.engine_http import ONE_CALL_EACH
from ckptsync.errors import NoTransport, SchemaMismatch
from ckptsync.export.lora import MergedSource
from ckptsync.export.source import CheckpointSource
from ckptsync.sync import WeightSync
from ckptsync.transports.sglang_distributed import SglangDistributed
from ckptsync.transports.sglang_tensor import SglangTensor
from tests.lora.models import with_adapter
from tests.transports.sends import send
from watchers.engines.sglang import SglangEngine

from .conftest import Server, left_serving, load, staged

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]

Versions = dict[str, StagedVersion]


class HostMemory:
    """Shared memory in place of a GPU's."""

    def why_not(self) -> str | None:
        return None

    def own(self) -> str:
        return "cpu"

    def visible(self) -> list[str]:
        return ["cpu"]

    def buffer(self, _gpu: str, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def reduce(self, buffer: torch.Tensor) -> object:
        from torch.multiprocessing import reductions, set_sharing_strategy

        set_sharing_strategy("file_system")  # a descriptor would be handed to children only
        return reductions.reduce_tensor(buffer)

    def collect(self) -> None:
        """Freed with the last mapping."""


@pytest.fixture
def engine(sglang_server: Server) -> Iterator[SglangEngine]:
    with left_serving(SglangEngine(sglang_server.url)) as engine:
        yield engine


@pytest.fixture(params=["tensor", "distributed"])
def transport(request: pytest.FixtureRequest) -> Iterator[object]:
    made = {
        "tensor": lambda: SglangTensor(devices=HostMemory(), verify=True),
        "distributed": lambda: SglangDistributed(backend="gloo", verify=True),
    }[request.param]()
    yield made
    made.close()


def test_both_paths_give_the_tokens_of_a_load_from_files(
    engine: SglangEngine, sglang_server: Server, versions: Versions, transport: SglangTensor
) -> None:
    load(engine, versions["b"])
    of_b = sglang_server.tokens()
    load(engine, versions["a"])
    of_a = sglang_server.tokens()
    assert transport.probe([engine]) is None
    for number, (name, tokens) in enumerate([("b", of_b), ("a", of_a)], 7):
        engine.pause()
        send(transport, CheckpointSource(versions[name].folder), [engine], number, bucket_bytes=1 << 20)
        assert engine.status().label == f"e1-v{number}"
        engine.resume()
        assert sglang_server.tokens() == tokens
    assert of_a != of_b
    (verdict,) = transport.verification.verdicts.values()
    assert verdict == (True, "no engine like it to compare with; changed with the weights", False)


class Drops(httpx.HTTPTransport):
    """Answers 200 to updates in the server's place, while `on`."""

    on = True

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.on and request.url.path == "/update_weights_from_tensor":
            return httpx.Response(200, json={"success": True, "message": "Success"})
        return super().handle_request(request)


def test_an_update_that_one_of_two_replicas_did_not_take_is_found_by_their_own_checksums(
    engine: SglangEngine, second_sglang: Server, versions: Versions, tmp_path: Path
) -> None:
    drops, b = Drops(limits=ONE_CALL_EACH), CheckpointSource(versions["b"].folder)
    with left_serving(SglangEngine(second_sglang.url, transport=drops)) as other:
        load(other, versions["a"])
        gpus = {engine.name: ["cpu"], other.name: ["cpu"]}
        transport = SglangTensor(devices=HostMemory(), gpus=gpus, verify=True)
        options = {"engines": [engine, other], "allow_older": True}
        with WeightSync([transport], channel=str(tmp_path / "root"), **options) as sync:
            with pytest.raises(NoTransport, match=f"{other.name}: differs from {engine.name} in .*lm_head.weight"):
                sync.sync(b)
            assert {each.status().label for each in (engine, other)} == {"partial e1-v1"}
            drops.on = False
            assert set(sync.sync(b).confirmed) == set(gpus)
    verdicts = transport.verification.verdicts.values()
    assert {verdict.says for verdict in verdicts} == {"has the sums of 1 more; nothing was sent before"}


def test_lora_folded_in_gives_the_tokens_of_the_merged_checkpoint(
    engine: SglangEngine, sglang_server: Server, versions: Versions, transport: SglangTensor, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(versions["a"].folder, dtype=torch.bfloat16)
    model = with_adapter(base, 3)
    save_file(dict(MergedSource(model)), tmp_path / "model.safetensors")
    merged = staged(str(tmp_path), 5)
    shutil.copy(f"{versions['a'].folder}/config.json", tmp_path)
    load(engine, merged)
    of_merged = sglang_server.tokens()
    load(engine, versions["a"])
    assert sglang_server.tokens() != of_merged
    with WeightSync([transport], channel=str(tmp_path / "root"), engines=[engine], allow_older=True) as sync:
        done = sync.sync(model, merge_lora=True)
        # SGLang 0.5.23 would die of it.
        with pytest.raises(SchemaMismatch, match=r"1 of another shape \(model.norm.weight 7 but the engine has 128\)"):
            sync.sync({**dict(MergedSource(model)), "model.norm.weight": torch.ones(7, dtype=torch.bfloat16)})
    assert (done.transport, engine.version()) == (transport.name, done.version)
    assert sglang_server.tokens() == of_merged


class BreaksOff(CheckpointSource):
    """A trainer's source that fails in the middle."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for count, named in enumerate(super().__iter__()):
            if count == 5:
                raise OSError("the trainer's disk is gone")
            yield named


def test_a_send_that_breaks_off_leaves_no_version_and_a_whole_resend_repairs(
    engine: SglangEngine, sglang_server: Server, versions: Versions, transport: SglangTensor
) -> None:
    load(engine, versions["a"])
    of_a = sglang_server.tokens()
    engine.pause()
    with pytest.raises(OSError, match="disk is gone"):
        send(transport, BreaksOff(versions["b"].folder), [engine], 8, bucket_bytes=1 << 16)
    assert engine.status().label == "partial e1-v8"
    send(transport, CheckpointSource(versions["a"].folder), [engine], 9, bucket_bytes=1 << 20)
    assert engine.status().label == "e1-v9"
    engine.resume()
    assert sglang_server.tokens() == of_a
