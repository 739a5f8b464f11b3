"""From a published folder over a store into a real server, through the real watcher; and what goes wrong there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptsync.channel import Channel
from ckptsync.copies import export_version
from ckptsync.engine import Engine, StagedVersion
from ckptsync.export.source import CheckpointSource
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.store.base import Store
from tests.live.versions import Tensors, shards, without_a_layer, without_q_proj
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine
from watchers.health import Receipt
from watchers.watcher import Watcher

from .conftest import Server, Started, models, until

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]

Publish = Callable[..., str]


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(f"{request.param}_server")


def adapter(server: Server) -> Engine:
    return VllmEngine(server.url) if server.engine == "vllm" else SglangEngine(server.url)


@pytest.fixture
def watch(server: Server, tmp_path) -> Iterator[Callable[..., Watcher]]:
    """A watcher of the server; whatever happens, the next test finds one that serves."""
    watchers: list[Watcher] = []

    def make(root: str | Store, engine: Engine | None = None, **options) -> Watcher:
        watcher = Watcher(root, engine or adapter(server), stage=str(tmp_path / "stage"), reader="r", **options)
        watchers.append(watcher)
        return watcher

    yield make
    for watcher in watchers:
        watcher.close()
        watcher.engine.close()
    with closing(adapter(server)) as engine:
        if engine.status().paused:
            engine.resume()


def publisher_of(root: str | Store, tmp_path) -> tuple[Publisher, Publish]:
    publisher = Publisher(root)

    def publish(seed: int, **shape: int) -> str:
        folder = models.tiny_model(str(tmp_path / f"seed{seed}"), seed, **shape)
        return publisher.publish(CheckpointSource(folder), assets=folder).version.label

    return publisher, publish


@pytest.mark.s3
def test_over_s3_every_version_serves_the_tokens_of_a_fresh_server_forwards_and_back(
    server: Server, watch, s3_root, tmp_path, started_on_b: Callable[[str], Started]
) -> None:
    store = open_store(s3_root.url, options=s3_root.options)
    publisher, publish = publisher_of(store, tmp_path)
    watcher = watch(store)
    tokens = {}
    for seed in (2, 22, 23):  # the first is version `b` of `versions`
        label = publish(seed)
        receipt = watcher.step()
        assert receipt is not None
        assert (receipt.state, receipt.label) == ("serving", label), receipt
        tokens[label] = server.tokens()
    publisher.close()
    assert watcher.health.ready
    assert len({str(found) for found in tokens.values()}) == 3, "the versions must answer differently"

    for label in ("e1-v1", "e1-v3", "e1-v1"):
        receipt = watcher.load_version(label)
        assert (receipt.state, receipt.label) == ("serving", label)
        assert server.tokens() == tokens[label]
        assert watcher.engine.status().label == label

    assert started_on_b(server.engine).tokens == tokens["e1-v1"]
    channel, exported = Channel.open(store), str(tmp_path / "v1")
    export_version(channel, channel.resolve("1"), exported)
    found, sent = tensors_in(exported), tensors_in(str(tmp_path / "seed2"))
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], sent[name]) for name in sent)


def tensors_in(folder: str) -> Tensors:
    return {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}


def test_a_version_that_is_damaged_or_does_not_fit_never_reaches_the_server(server: Server, watch, tmp_path) -> None:
    root = str(tmp_path / "root")
    publisher, publish = publisher_of(root, tmp_path)
    receipts: list[Receipt] = []
    watcher = watch(root, on_receipt=receipts.append)
    publish(31)
    assert watcher.step().state == "serving"
    served = server.tokens()

    publish(32)
    flip_a_bit(root, "2")
    publish(33, intermediate_size=128)
    for change in (without_a_layer, without_q_proj):
        publish_broken(publisher, str(tmp_path / change.__name__), change)
    pauses = count_pauses(watcher.engine)
    for _ in range(6):
        watcher.step()
    assert pauses == []
    assert server.tokens() == served
    assert (watcher.health.ready, watcher.health.version) == (True, "e1-v1")
    refused = [receipt.error["kind"] for receipt in receipts if receipt.state == "refused" and receipt.error]
    assert sorted(refused) == ["bad-shard", *["schema-mismatch"] * 3]

    publish(34)
    assert watcher.step().label == "e1-v6"
    assert server.tokens() != served
    publisher.close()


def publish_broken(publisher: Publisher, folder: str, change: Callable[[Tensors], None]) -> None:
    """A whole model, but for the change."""
    tensors: Tensors = {}
    models.tiny_model(folder, 35)
    for path in shards(folder):
        tensors |= load_file(path)
        os.unlink(path)
    change(tensors)
    os.unlink(os.path.join(folder, "model.safetensors.index.json"))
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    publisher.publish(CheckpointSource(folder), assets=folder)


def flip_a_bit(root: str, label: str) -> None:
    manifest = Channel.open(root).resolve(label)
    file = next(f.name for f in manifest.tracks["model"].files if f.name.endswith(".safetensors"))
    with open(os.path.join(root, manifest.folder, file), "r+b") as shard:
        shard.seek(-1000, os.SEEK_END)
        byte = shard.read(1)[0]
        shard.seek(-1, os.SEEK_CUR)
        shard.write(bytes([byte ^ 4]))


def count_pauses(engine: Engine) -> list[str]:
    seen: list[str] = []
    pause = engine.pause

    def counted() -> None:
        seen.append("pause")
        pause()

    engine.pause = counted  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("server", ["vllm"], indirect=True)
def test_a_load_that_breaks_off_in_the_middle_ends_with_the_old_version_serving(
    server: Server, watch, tmp_path
) -> None:
    """Resumed as it is then, vLLM dies at the next request. (SGLang dies of the load: as if it were killed.)"""
    publisher, publish = publisher_of(str(tmp_path / "root"), tmp_path)
    watcher = watch(str(tmp_path / "root"))
    publish(51)
    assert watcher.step().state == "serving"
    served = server.tokens()
    publish(52)
    publisher.close()

    update = watcher.engine.update
    watcher.engine.update = lambda version: update(cut_short(version, str(tmp_path / "cut")))  # type: ignore[method-assign]
    receipt = watcher.step()
    assert (receipt.state, receipt.label, receipt.error["kind"]) == ("failed", "e1-v1", "engine-dirty")
    assert (watcher.health.ready, watcher.health.version) == (True, "e1-v1")
    assert server.tokens() == served


def cut_short(version: StagedVersion, folder: str) -> StagedVersion:
    """Version 2 with half of its last shard; any other as it is."""
    if version.manifest.number != 2:
        return version
    shutil.copytree(version.folder, folder)
    last = shards(folder)[-1]
    os.truncate(last, os.path.getsize(last) // 2)
    return replace(version, folder=folder)


def test_a_server_killed_in_mid_load_comes_back_on_the_current_version_before_it_is_ready(
    server: Server, watch, tmp_path
) -> None:
    root = str(tmp_path / "root")
    publisher, publish = publisher_of(root, tmp_path)
    engine = adapter(server)
    watcher = watch(root, engine)
    for seed in (41, 42):
        publish(seed)
        assert watcher.step().state == "serving"
    served, before = server.tokens(), engine.status()
    publish(43)
    publisher.close()

    update = engine.update
    engine.update = lambda version: killed_while(server, update, version)  # type: ignore[method-assign]
    assert watcher.step().state != "serving"
    assert not watcher.health.ready
    engine.update = update  # type: ignore[method-assign]

    server.restart()
    after = engine.status()
    assert (before.label, after.label) == ("e1-v2", ""), "it came up on its base weights"
    assert before.boot_id != after.boot_id
    until(lambda: watcher.step() is not None and watcher.health.ready, 120, "the watcher has loaded a version")
    until(lambda: watcher.health.version == "e1-v3" or watcher.step() is None, 120, "nothing is left to do")
    assert watcher.health.version == engine.status().label == "e1-v3"
    assert server.tokens() != served
    assert watcher.load_version("2").label == "e1-v2"
    assert server.tokens() == served


def killed_while(server: Server, update: Callable[[StagedVersion], None], version: StagedVersion) -> None:
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    update(version)
