"""An engine that is started with `--load-format ckptsync` comes up on the channel's version."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from tests.vllm_plugin.conftest import InProcess, Start
from tests.watcher.publish_folder import publish_folder
from watchers.stage import Stage

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def base(tmp_path: Any, folders: dict[str, str]) -> str:
    """Config and tokenizer, without weights."""
    base = str(tmp_path / "base")
    shutil.copytree(folders["a"], base, ignore=shutil.ignore_patterns("*.safetensors*"))
    return base


def started(start_vllm: Start, base: str, root: str, stage: str, **more: str) -> InProcess:
    extra = {"root": root, "stage": stage, **more}
    return start_vllm(base, load_format="ckptsync", model_loader_extra_config=extra)


def test_an_engine_starts_and_restarts_on_the_current_version(
    start_vllm: Start, base: str, tmp_path: Any, folders: dict[str, str], fresh_tokens: Any
) -> None:
    root, stage = str(tmp_path / "root"), str(tmp_path / "stage")
    publish_folder(root, folders["b"])
    engine = started(start_vllm, base, root, stage)
    assert engine.tokens() == fresh_tokens("b")
    manifest = publish_folder(root, folders["c"])
    engine.reload_due()  # vLLM's own reload goes to the version that is due as well
    assert engine.tokens() == fresh_tokens("c")
    engine.stop()
    again = started(start_vllm, base, root, stage)
    assert again.tokens() == fresh_tokens("c")
    assert not [name for name in os.listdir(base) if name.endswith(".safetensors")]
    # From there updates go on as ever, and a failed first one goes back to what it was started on.
    before = again.digest()
    version: StagedVersion = Stage(stage).stage(Channel.open(root), publish_folder(root, folders["a"]))
    again.break_load_at(name="model.norm.weight")
    assert again.to(version)["state"] == "restored"
    assert again.digest() == before
    assert again.to(version)["state"] == "loaded"
    assert again.tokens() == fresh_tokens("a")
    assert manifest.id != version.manifest.id


def test_a_named_version_is_loaded_whatever_is_newer(
    start_vllm: Start, base: str, tmp_path: Any, folders: dict[str, str], fresh_tokens: Any
) -> None:
    root, stage = str(tmp_path / "root"), str(tmp_path / "stage")
    first = publish_folder(root, folders["b"])
    publish_folder(root, folders["c"])
    engine = started(start_vllm, base, root, stage, version=first.id.label)
    assert engine.tokens() == fresh_tokens("b")


def test_an_empty_channel_starts_on_the_base_folder(
    start_vllm: Start, tmp_path: Any, folders: dict[str, str], fresh_tokens: Any
) -> None:
    Channel.create(str(tmp_path / "root"))
    engine = started(start_vllm, folders["a"], str(tmp_path / "root"), str(tmp_path / "stage"))
    assert engine.tokens() == fresh_tokens("a")
