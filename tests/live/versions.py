"""Three versions of a tiny Qwen3, and broken ones, for both engines' plugins. Fixtures, for a conftest to import."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from tests.vllm_plugin import overlay  # noqa: F401 - finds `models`
from tests.watcher.publish_folder import publish_folder
from watchers.stage import Stage

import models  # isort: skip

Versions = dict[str, StagedVersion]
Tensors = dict[str, Any]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    return {name: models.tiny_model(str(base / name), seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="session")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StagedVersion]:
    """Publish a folder into a channel and stage it, as a watcher would."""
    base = tmp_path_factory.mktemp("channel")

    def publish(folder: str) -> StagedVersion:
        manifest = publish_folder(str(base / "root"), folder)
        return Stage(str(base / "stage"), keep=100).stage(Channel.open(str(base / "root")), manifest)

    return publish


@pytest.fixture(scope="session")
def versions(folders: dict[str, str], staged: Callable[[str], StagedVersion]) -> Versions:
    return {name: staged(folder) for name, folder in folders.items()}


def without_a_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        del tensors[name]


def without_q_proj(tensors: Tensors) -> None:
    del tensors[Q_PROJ]


def with_a_wrong_shape(tensors: Tensors) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ][:-1].clone()


def with_one_more(tensors: Tensors) -> None:
    tensors["model.layers.0.extra.weight"] = tensors[Q_PROJ].clone()


@pytest.fixture(scope="module")
def broken(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str], staged: Callable[[str], StagedVersion]
) -> Callable[[Callable[[Tensors], None]], StagedVersion]:
    """Version `b` with a change, published and staged: whole and verified, and no checkpoint of this model."""
    from safetensors.torch import load_file, save_file

    def make(change: Callable[[Tensors], None]) -> StagedVersion:
        tensors: Tensors = {}
        for path in shards(folders["b"]):
            tensors |= load_file(path)
        change(tensors)
        folder = tmp_path_factory.mktemp(change.__name__)
        save_file(tensors, folder / "model.safetensors")
        return staged(str(folder))

    return make


def shards(folder: str) -> list[str]:
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".safetensors"))
