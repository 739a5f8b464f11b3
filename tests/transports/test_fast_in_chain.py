"""The fast transports inside WeightSync: who takes over, and what is left paused."""

from __future__ import annotations

import httpx
import pytest

import ckptsync
from ckptsync.errors import NoTransport
from ckptsync.transports.chain import Patience
from ckptsync.transports.checkpoint import Checkpoint
from ckptsync.transports.sglang_tensor import SglangTensor
from ckptsync.transports.vllm_ipc import VllmIpc
from tests.transports.receivers import FileDevices, TransferSglang, TransferVllm
from tests.transports.sends import Small, same, weights
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.vllm import VllmEngine, VllmOptions

KINDS = {
    "vllm": (TransferVllm, VllmEngine, VllmOptions, VllmIpc, "POST /update_weights"),
    "sglang": (TransferSglang, SglangEngine, SglangOptions, SglangTensor, "POST /update_weights_from_tensor"),
}


class Setting:
    """One engine, and a trainer with a fast path and files."""

    def __init__(self, kind, folder, files=True, **lenience):
        fake, adapter, options, transport, self.update = KINDS[kind]
        self.server = fake(["GPU-0"])
        quick = options(timeout=2.0, attempts=1, fingerprint=False)
        self.engine = adapter("http://127.0.0.1:1", quick, transport=self.server.transport)
        self.fast = transport(devices=FileDevices(str(folder), "GPU-0"))
        self.sync = ckptsync.WeightSync(
            [self.fast, *([Checkpoint()] if files else [])],
            channel=str(folder / "channel"),
            engines=[self.engine],
            bucket_bytes=600,
            patience=Patience(tries=2, wait=0.01),
            **lenience,
        )


@pytest.fixture(params=KINDS)
def setting(request, tmp_path):
    made = Setting(request.param, tmp_path)
    yield made
    made.sync.close()


def test_the_version_is_equal_on_both_sides_after_every_sync(setting):
    for seed in (1, 2, 3):
        model = Small(seed)
        done = setting.sync.sync(model)
        assert done.transport == setting.fast.name
        assert done.version.label == setting.server.label
        assert setting.sync.version == done.version
        assert same(setting.server.weights, weights(model))
        assert not setting.server.paused


def test_a_server_that_was_started_otherwise_is_left_to_files_untouched(setting):
    setting.fast._devices.why = "this trainer rank has no CUDA"
    done = setting.sync.sync(Small())
    assert done.transport == "checkpoint"
    assert done.dirty == ()
    assert "no CUDA" in str(done.failures[0])
    assert setting.server.updates == []


@pytest.mark.parametrize(
    "answer", [(500, {"success": False}), httpx.ReadTimeout("late")], ids=["an error", "a lost answer"]
)
def test_a_bucket_that_fails_leaves_the_engine_paused_without_a_version_and_files_take_over(setting, answer):
    setting.sync.sync(Small(1))
    setting.server.answers[setting.update] = answer
    done = setting.sync.sync(Small(2))
    assert done.transport == "checkpoint"
    assert done.dirty == (setting.engine.name,)
    assert setting.server.paused
    assert setting.server.label == f"partial {done.version.label}"


@pytest.mark.parametrize("kind", KINDS)
def test_without_files_the_next_whole_send_makes_a_dirty_engine_serve_again(kind, tmp_path):
    setting = Setting(kind, tmp_path, files=False)
    setting.server.answers[setting.update] = (500, {"success": False})
    with pytest.raises(NoTransport, match="Left paused"):
        setting.sync.sync(Small(1))
    assert setting.server.paused
    setting.server.answers.clear()
    model = Small(2)
    done = setting.sync.sync(model)
    setting.sync.close()
    assert done.dirty == ()
    assert not setting.server.paused
    assert same(setting.server.weights, weights(model))


def test_a_successor_takes_over_the_engine_that_a_dead_trainer_left_paused(setting, tmp_path):
    setting.server.paused, setting.server.open, setting.server.label = True, True, "partial e9-v1"
    with ckptsync.WeightSync(
        [type(setting.fast)(devices=FileDevices(str(tmp_path), "GPU-0"))],
        channel=str(tmp_path / "other"),
        engines=[setting.engine],
    ) as successor:
        done = successor.sync(Small(3))
    assert done.confirmed == (setting.engine.name,)
    assert not setting.server.paused
    assert same(setting.server.weights, weights(Small(3)))
