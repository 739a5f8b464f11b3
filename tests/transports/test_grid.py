"""The systems that this replaces, by name: UniRL's ways to sync weights, and the versions of vime and slime."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from ckptsync.errors import NoTransport, SchemaMismatch
from ckptsync.export.lora import MergedSource, export_adapter
from ckptsync.sync import WeightSync
from ckptsync.transports import Checkpoint, ModuleCopy, SglangLora
from ckptsync.transports.chain import Patience
from tests.engines.fakes import FakeSglang, FakeVllm
from tests.lora.models import TinyLM, randomise, with_adapter
from tests.transports.receivers import FileDevices, TransferSglang
from tests.transports.sends import Small, same, weights
from tests.transports.test_fit import started_on
from tests.transports.ways import WAYS, a_server, an_engine, transports
from watchers.adapters import AdapterEngine
from watchers.engines.module import ModuleEngine
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.vllm import VllmEngine, VllmOptions
from watchers.watcher import Watcher

NAMES = {"IPC": "vllm_ipc", "NCCL into vLLM": "vllm_nccl", "Tensor": "sglang_tensor",
         "NCCL into SGLang": "sglang_distributed"}  # fmt: skip
QUICK = Patience(tries=1, bench_after=99)


class Setting:
    """One engine of TP 2, and a trainer with one way to it."""

    def __init__(self, way: str, folder: str) -> None:
        self.server = a_server(way, ["GPU-0", "GPU-1"])
        self.engine = an_engine(way, "http://127.0.0.1:1", transport=self.server.transport)
        devices = FileDevices(folder, "GPU-0", ["GPU-0", "GPU-1"])
        self.way, (self.fast, _) = way, transports(way, self.server.group, devices)
        self.root = f"{folder}/root"

    def sync(self, **more: Any) -> WeightSync:
        options = {"patience": QUICK, "bucket_bytes": 600, **more}
        return WeightSync([self.fast], channel=self.root, engines=[self.engine], **options)

    def get_weight_version(self) -> str:
        """As vime and slime ask for it."""
        path = "/weight_info" if self.way.startswith("vllm") else "/model_info"
        return str(self.engine.http.peek(path)["weight_version"])


@pytest.fixture(params=NAMES.values(), ids=NAMES)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(request.param, str(tmp_path_factory.mktemp("grid")))


def test_unirl_full_weights_arrive_and_every_side_tells_one_version(setting):
    with setting.sync() as sync:
        for seed in (1, 2, 3):
            done = sync.sync(Small(seed))
            assert (done.transport, done.version.label) == (setting.way, f"e1-v{seed}")
            assert setting.engine.version() == sync.version == done.version
            assert setting.get_weight_version() == done.version.label
            assert same(setting.server.weights, weights(Small(seed)))


def test_unirl_lora_is_folded_in_where_the_server_takes_no_adapter(setting):
    model = with_adapter(TinyLM(), 1, task_type=None)
    with setting.sync() as sync:
        for seed in (1, 2):
            randomise(model, seed)
            done = sync.sync(model, merge_lora=True)
            assert (done.transport, setting.engine.version()) == (setting.way, done.version)
            assert same(setting.server.weights, dict(MergedSource(model)))
        with pytest.raises(NoTransport, match="merge_lora=True folds it in"):
            sync.sync(model, kind="adapter")


@pytest.mark.parametrize("answer", [(500, {"success": False}), httpx.ReadTimeout("late")], ids=["failed", "timed out"])
@pytest.mark.parametrize("step", ["bucket", "finish"])
def test_vime_and_slime_a_post_that_fails_or_times_out_does_not_advance_the_version(setting, step, answer):
    with setting.sync() as sync:
        first = sync.sync(Small(1))
        setting.server.answers[getattr(WAYS[setting.way][1], step)] = answer
        with pytest.raises(NoTransport):
            sync.sync(Small(2))
        assert setting.get_weight_version() == "partial e1-v2"
        assert (setting.engine.version(), sync.version) == (None, first.version)
        setting.server.answers.clear()
        done = sync.sync(Small(3))
        assert setting.get_weight_version() == done.version.label == "e1-v3"


def test_unirl_a_param_prefix_that_is_not_the_engines_is_detected(setting, tmp_path):
    started_on(setting, str(tmp_path), Small())
    with setting.sync(param_prefix="policy.") as sync, pytest.raises(SchemaMismatch, match=r"policy\.embed"):
        sync.sync(Small(1))
    assert (setting.engine.version(), setting.server.updates, setting.server.paused) == (None, [], False)


def test_unirl_a_version_of_several_tracks_is_not_given_to_a_server_of_one_model(setting):
    with (
        setting.sync() as sync,
        pytest.raises(NoTransport, match="the server has one model, and e1-v1 the tracks ar, vae"),
    ):
        sync.sync(tracks={"ar": Small(1), "vae": Small(2)})
    assert (setting.engine.version(), setting.server.updates, setting.server.paused) == (None, [], False)


def test_unirl_local_lora_goes_into_the_adapter_of_a_sibling(tmp_path):
    trained, sibling = (with_adapter(TinyLM(), seed, task_type=None) for seed in (1, 2))
    engine = ModuleEngine(sibling)
    with WeightSync([ModuleCopy()], channel=str(tmp_path), engines=[engine]) as sync:
        done = sync.sync(trained, kind="adapter")
    assert (done.transport, engine.version()) == ("module", done.version)
    assert same(export_adapter(sibling).tensors, export_adapter(trained).tensors)


def test_unirl_remote_lora_at_tp_2_needs_no_one_shot_handle(tmp_path):
    server, trained = TransferSglang(["cpu", "cpu"]), with_adapter(TinyLM(), 1, task_type=None)
    replica = SglangEngine("http://127.0.0.1:1", SglangOptions(attempts=1), transport=server.transport)
    engine = AdapterEngine([replica], name="policy")
    with WeightSync([SglangLora(verify=True)], channel=str(tmp_path), engines=[engine]) as sync:
        done = sync.sync(trained, kind="adapter")
    assert (done.transport, engine.version()) == ("sglang_lora", done.version)
    # The fake opens what it is sent once for each rank, and refuses every handle.
    assert same(server.adapters["policy@e1-v1"], export_adapter(trained).tensors)


BY_FILES: dict[str, Any] = {
    "vllm": (FakeVllm, VllmEngine, VllmOptions(attempts=1, fingerprint=False)),
    "sglang": (FakeSglang, SglangEngine, SglangOptions(attempts=1, fingerprint=False)),
}


@pytest.mark.parametrize("kind", BY_FILES)
def test_unirl_checkpoint_the_same_counter_by_files(kind, tmp_path):
    server, adapter, options = BY_FILES[kind][0](), *BY_FILES[kind][1:]
    with ExitStack() as stack:
        trainers, watchers = (
            stack.enter_context(closing(adapter("http://127.0.0.1:1", options, transport=server.transport)))
            for _ in range(2)
        )
        sync = stack.enter_context(WeightSync([Checkpoint()], channel=str(tmp_path / "root"), engines=[trainers]))
        watcher = Watcher(str(tmp_path / "root"), watchers, stage=str(tmp_path / "stage"), reader="r", events=False)
        stack.callback(watcher.close)
        for seed in (1, 2):
            done = sync.sync(Small(seed))
            assert (done.transport, done.behind != {}) == ("checkpoint", True), "nobody waited for"
            watcher.step()
            assert trainers.version() == done.version
