"""An `sglang.Engine` in the watcher's own process: the same routes, the same adapters, no socket."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.engines.conftest import PROMPTS
from tests.watcher.publish_folder import publish_folder

import make  # isort: skip - found through overlay
import measured  # isort: skip
import models  # isort: skip
import serve  # isort: skip

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_an_engine_in_process_is_watched_between_prompts(tmp_path: Any, plugin_path: str) -> None:
    """A mixture of experts: their many tensors are parts of two parameters, which the plan covers."""
    root = str(tmp_path / "root")
    folders = {
        name: models.tiny_model(str(tmp_path / name), seed, family="qwen3_moe") for seed, name in enumerate("ab")
    }
    for name in "ab":
        publish_folder(root, folders[name])
    options = {"model": folders["a"], "root": root, "stage": str(tmp_path / "stage"), "prompts": PROMPTS[:2]}
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inprocess.py")
    argv = [make.ensure("sglang"), script, json.dumps(options)]
    env = serve.environment("sglang", {**os.environ, **measured.environment(), "PYTHONPATH": plugin_path})
    env["CKPTSYNC_TEST_SPAWN"] = "1"  # as it starts its processes by itself, and the plugin in each
    with (
        make.locked(os.path.join(make.cache_dir(), "engine-start.lock")),
        open(tmp_path / "log", "w+", encoding="utf-8") as log,
    ):
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        log.seek(0)
        assert done.returncode == 0, log.read()[-5000:]
    base, *steps, disk = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(step["step"], step["label"], step["state"]) for step in [*steps, disk]] == [
        ("plugin", "e1-v2", "serving"),
        ("plugin", "e1-v1", "serving"),
        ("plugin", "e1-v2", "serving"),
        ("disk", "e1-v1", "serving"),
    ]
    assert [step["warnings"][0].split(",")[0] for step in steps[1:]] == ["rank 0: loaded by the copy plan"] * 2
    assert disk["fingerprint"]
    assert base["tokens"] == steps[1]["tokens"] == disk["tokens"]
    assert steps[0]["tokens"] == steps[2]["tokens"] != base["tokens"]
