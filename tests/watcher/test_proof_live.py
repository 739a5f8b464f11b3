"""Levels 3 and 4 on real models: what digests of files cannot see, planted in a live engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptsync.engine import StagedVersion
from ckptsync.export.source import CheckpointSource
from ckptsync.publish import Publisher
from tests.envs.models import canary_of, tiny_model
from watchers.engines import module as module_engine
from watchers.engines.embedded import EmbeddedEngine
from watchers.engines.module import ModuleEngine
from watchers.watcher import Watcher

from .actions import step
from .test_embedded import Server

pytestmark = pytest.mark.slow

PROMPT = [7 * i % 251 for i in range(40)]


def model_in(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The base model and two versions of it."""
    base = tmp_path_factory.mktemp("models")
    return [tiny_model(str(base / str(seed)), seed) for seed in range(3)]


@pytest.fixture
def publish(root: str) -> Iterator[Callable[[str], Any]]:
    with Publisher(root) as publisher:
        yield lambda folder: publisher.publish(
            CheckpointSource(folder), assets=folder, canary=canary_of(folder, PROMPT)
        )


@pytest.fixture
def watch(root: str, tmp_path: Any) -> Iterator[Callable[..., Watcher]]:
    made: list[Watcher] = []

    def make(engine: Any, **options: Any) -> Watcher:
        stage = str(tmp_path / "stage")
        made.append(Watcher(root, engine, stage=stage, reader=f"r{len(made)}", poll=0.05, **options))
        return made[-1]

    yield make
    for watcher in made:
        watcher.engine.close()
        watcher.close()


@pytest.fixture
def serve() -> Iterator[Callable[[str], Server]]:
    servers: list[Server] = []

    def start(folder: str) -> Server:
        servers.append(Server(folder))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def with_other_rope(folder: str, copy: str) -> str:
    """The same weights under a config that turns positions otherwise."""
    shutil.copytree(folder, copy)
    with open(f"{copy}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    config["rope_parameters"]["rope_theta"] = 40.0
    with open(f"{copy}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    return copy


def test_a_server_that_turns_positions_otherwise_holds_the_right_weights_and_fails_the_canary(
    folders: list[str],
    publish: Callable[[str], Any],
    watch: Callable[..., Watcher],
    serve: Callable[[str], Server],
    tmp_path: Any,
) -> None:
    wrong = serve(with_other_rope(folders[0], str(tmp_path / "other")))
    publish(folders[1])
    assert step(watch(EmbeddedEngine(wrong.url), proof=3)).state == "serving", "every element reads back"
    watcher = watch(EmbeddedEngine(wrong.url), proof=4)
    receipt = step(watcher)
    assert receipt.error is not None
    assert (receipt.state, receipt.error["kind"]) == ("dirty", "proof-failed")
    assert "level 4" in receipt.error["message"]
    assert "output position 0" in receipt.error["message"]
    assert not watcher.health.ready


def test_a_module_that_computes_otherwise_from_the_second_load_on_is_brought_back(
    folders: list[str], publish: Callable[[str], Any], watch: Callable[..., Watcher]
) -> None:
    """Logits of another scale: what a missed scale of a quantized head does."""
    model = model_in(folders[0])
    engine = ScalesLogits(model, label="e1-v2")
    watcher = watch(engine, proof=4)
    publish(folders[1])
    assert step(watcher).state == "serving"
    publish(folders[2])
    receipt = step(watcher)
    assert receipt.error is not None
    assert (receipt.state, receipt.label, receipt.error["kind"]) == ("failed", "e1-v1", "proof-failed")
    assert (watcher.health.ready, watcher.health.version) == (True, "e1-v1")


class ScalesLogits(ModuleEngine):
    """Holds every version as published, and computes with a wrong scale while it holds `label`."""

    def __init__(self, module: Any, *, label: str) -> None:
        super().__init__(module)
        module.lm_head.register_forward_hook(lambda _, __, out: out * 0.8 if self._label == label else out)


def test_a_module_that_silently_keeps_one_tensor_old_is_told_by_reading_back(
    folders: list[str], publish: Callable[[str], Any], watch: Callable[..., Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ModuleEngine(model_in(folders[0]))
    watcher = watch(engine, proof=3)
    publish(folders[1])
    assert step(watcher).state == "serving"
    publish(folders[2])
    forgets(engine, "model.layers.1.mlp.up_proj.weight", "e1-v2", monkeypatch)
    receipt = step(watcher)
    assert receipt.error is not None
    assert (receipt.state, receipt.label, receipt.error["kind"]) == ("failed", "e1-v1", "proof-failed")
    assert "model.layers.1.mlp.up_proj.weight is not the one of e1-v2" in receipt.error["message"]


def forgets(engine: ModuleEngine, name: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of one tensor goes nowhere while `label` is loaded."""
    update, live = engine.update, module_engine._live

    def forgetful(version: StagedVersion) -> None:
        with monkeypatch.context() as patch:
            if version.label == label:
                patch.setattr(
                    module_engine,
                    "_live",
                    lambda *given: ((n, t.clone() if n == name else t) for n, t in live(*given)),
                )
            update(version)

    monkeypatch.setattr(engine, "update", forgetful)
