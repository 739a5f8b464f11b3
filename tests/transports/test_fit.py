"""What is refused before an engine is paused, whichever way the weights would have gone."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

from ckptsync.channel import Channel
from ckptsync.errors import NoTransport, OutOfOrder, SchemaMismatch, VersionExists
from ckptsync.store import LocalStore
from tests.transports.fakes import Box, Carrier
from tests.transports.jobs import a_sync, holds, model_of
from tests.transports.sends import Small, same, weights
from tests.transports.test_fast_in_chain import KINDS, Setting


def started_on(setting: Setting, folder: str, model: Small) -> Setting:
    """The engine's server has loaded this model's checkpoint from there."""
    save_file(weights(model), f"{folder}/model.safetensors")
    setting.server.root = setting.server.path = folder
    setting.server.arguments = {"model_path": folder}
    return setting


@pytest.fixture(params=KINDS)
def setting(request, tmp_path_factory):
    made = Setting(request.param, tmp_path_factory.mktemp("setting"))
    yield made
    made.sync.close()


def renamed(model: Small) -> Small:
    model.scaled = model.scale
    del model.scale
    return model


def reshaped(model: Small) -> Small:
    model.odd = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    return model


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (renamed, "1 that the engine needs are not in the version (scale); 1 that the engine does not know (scaled)"),
        (reshaped, "1 of another shape (odd 8 but the engine has 7)"),
        (lambda model: model.float(), "8 of another dtype (embed F32 but the engine has BF16"),
    ],
    ids=["names", "shapes", "dtypes"],
)
def test_a_version_that_does_not_fit_is_refused_before_the_engine_is_paused(setting, tmp_path, other, words):
    started_on(setting, str(tmp_path), Small())
    setting.server.label = "e0-v0"
    with pytest.raises(SchemaMismatch, match=re.escape(f"does not fit {setting.engine.name}: {words}")):
        setting.sync.sync(other(Small(1)))
    assert not [call for call in setting.server.seen if call.startswith("POST")], "nothing was asked of it but looks"
    assert (setting.server.label, setting.sync.version) == ("e0-v0", None)
    done = setting.sync.sync(Small(2))
    assert (done.transport, done.version.label) == (setting.fast.name, "e1-v1"), "what is refused takes no number"
    assert same(setting.server.weights, weights(Small(2)))


def test_another_float_dtype_is_sent_if_it_was_asked_for(tmp_path, tmp_path_factory):
    setting = started_on(Setting("vllm", tmp_path_factory.mktemp("s"), allow_cast=True), str(tmp_path), Small())
    with setting.sync as sync:
        assert sync.sync(Small(1).float()).transport == "vllm_ipc"
        with pytest.raises(SchemaMismatch):
            sync.sync(reshaped(Small(1)))


@pytest.mark.parametrize("label", ["e5-v100", "e1-v1"], ids=["a newer version", "the same number"])
def test_what_another_channel_has_left_on_an_engine_is_not_overwritten_unasked(setting, label):
    setting.server.label = label
    remedy = r"Go on in that channel, or ask for it with WeightSync\(allow_older=True\)"
    with pytest.raises(OutOfOrder, match=rf"e1-v1 is not newer than {label}, which .* holds: .*{remedy}"):
        setting.sync.sync(Small(1))
    assert (setting.server.label, setting.server.paused, setting.server.updates) == (label, False, [])


def test_refusals_do_not_count_up_to_the_label_of_another_channel(tmp_path):
    box, channel = Box("b", label="e1-v3"), Channel(LocalStore(str(tmp_path)))
    for epoch in (1, 2):  # a supervisor starts the trainer again
        with a_sync(str(tmp_path), [Carrier()], [box]) as sync:
            for _ in range(4):
                with pytest.raises(OutOfOrder, match=r"e1-v3.*allow_older=True"):
                    sync.sync(model_of(0, 1))
        assert (box.label, box.weights, channel.newest_sent()) == ("e1-v3", {}, None), epoch
    with a_sync(str(tmp_path), [Carrier()], [box], allow_older=True) as sync:
        assert sync.sync(model_of(0, 1)).confirmed == ("b",)
    assert box.label == "e3-v1"
    with a_sync(str(tmp_path), [Carrier()], [box]) as sync:
        assert sync.sync(model_of(0, 1)).version.label == "e4-v1", "its own label is no other channel's"


@pytest.mark.parametrize(("fault", "label"), [("probe", "e1-v1"), ("start", "e1-v1"), ("mid", "e1-v2")])
def test_a_number_is_used_up_only_if_an_engine_may_hold_some_of_it(tmp_path, fault, label):
    with a_sync(str(tmp_path), [Carrier(fault=fault)], [Box("b")]) as sync:
        with pytest.raises(NoTransport):
            sync.sync(model_of(0, 1))
        assert sync.sync(model_of(0, 1)).version.label == label


def test_an_older_version_is_sent_if_it_was_asked_for(tmp_path):
    setting = Setting("sglang", tmp_path, allow_older=True)
    setting.server.label = "e5-v100"
    with setting.sync as sync:
        assert sync.sync(Small(1)).confirmed == (setting.engine.name,)
    assert setting.server.label == "e1-v1"


@pytest.mark.parametrize("fault", ["probe", "start", "mid"])
def test_a_label_of_another_channel_is_never_taken_for_what_was_sent(tmp_path, fault):
    box = Box("b", label="e1-v1")
    with a_sync(str(tmp_path), [Carrier(fault=fault), Carrier("spare")], [box], allow_older=True) as sync:
        done = sync.sync(model_of(0, 1))
    assert (done.transport, done.confirmed, box.paused) == ("spare", ("b",), False)
    assert holds(box)


class Drifting(Carrier):
    """Breaks off at the end, and the trainer goes on training meanwhile."""

    def send(self, sending):
        try:
            super().send(sending)
        finally:
            with torch.no_grad():
                self.model.head.weight.add_(1.0)


def test_weights_that_change_between_two_attempts_are_no_version(tmp_path):
    boxes = [Box("a"), Box("b")]
    fast = Drifting(fault="finish")
    with a_sync(str(tmp_path), [fast, Carrier("spare")], boxes) as sync:
        fast.model = model = model_of(0, 1)
        with pytest.raises(VersionExists, match="e1-v1 changed between two attempts"):
            sync.sync(model)
        assert [(box.label, box.paused) for box in boxes] == [("e1-v1", False), ("", True)]
        assert not holds(boxes[1])
        assert sync.sync(model_of(0, 1)).confirmed == ("a", "b")
    assert holds(boxes[0])
    assert holds(boxes[1])
