"""An engine follows delta versions as it follows full ones; a reader without the extra says so and serves on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from ckptsync import Channel, DeltaPolicy, Publisher
from ckptsync.version import VersionId
from watchers.engines.module import ModuleEngine
from watchers.watcher import Watcher

from .test_versions import damage, delta_file


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))


def train(model: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[seed::50] *= 1.01


@pytest.fixture
def followed(tmp_path):
    """(root, trainer's model, publisher, engine's model, watcher)"""
    root, model, served = str(tmp_path / "root"), small(), small()
    publisher = Publisher(root, delta=DeltaPolicy(anchor_every=3, skip=()))
    publisher.publish(model)
    watcher = Watcher(root, ModuleEngine(served), stage=str(tmp_path / "stage"), events=False)
    watcher.step()
    yield root, model, publisher, served, watcher
    watcher.close()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_watcher_brings_the_engine_to_every_delta_and_back(followed):
    _, model, publisher, served, watcher = followed
    past = {}
    for seed in range(5):
        train(model, seed)
        version = publisher.publish(model).version
        watcher.step()
        assert equal(served, model)
        past[version] = [p.clone() for p in model.parameters()]
    receipt = watcher.load_version("3")
    assert (receipt.state, receipt.version) == ("serving", "e1-v3")
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), past[VersionId(1, 3)], strict=True))


def test_a_damaged_delta_is_refused_and_the_old_version_serves_on(followed):
    root, model, publisher, served, watcher = followed
    before = [p.clone() for p in served.parameters()]
    train(model, 0)
    publisher.publish(model)
    damage(root, delta_file(Channel.open(root).latest()))
    watcher.step()
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), before, strict=True))
    train(model, 1)
    publisher.publish(model)
    train(model, 2)
    publisher.publish(model)
    watcher.step()
    assert Channel.open(root).latest().kind == "full"
    assert equal(served, model), "the next full version gets it going again"


@pytest.mark.parametrize("missing", ["zstandard", "numpy"])
def test_without_the_extra_deltas_are_refused_with_the_remedy_and_full_versions_are_read(followed, tmp_path, missing):
    root, model, publisher, _, _ = followed
    for seed in range(3):
        train(model, seed)
        publisher.publish(model)
    script = f"""
import sys
sys.modules[{missing!r}] = None
from ckptsync.channel import Channel
from ckptsync.errors import UnsupportedFormat
from watchers.stage import Stage
channel, stage = Channel.open({root!r}), Stage({str(tmp_path / "other")!r})
try:
    stage.stage(channel, channel.resolve("3"))
except UnsupportedFormat as error:
    assert "pip install 'ckptsync[delta]'" in str(error)
    assert channel.resolve("4").kind == "full" and channel.resolve("4").parent
    stage.stage(channel, channel.resolve("4"))
    print("read")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "read\n"
