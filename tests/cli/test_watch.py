"""`ckptsync watch` and `load` as processes, over a real S3 server, into a real (embedded) engine server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ckptsync.export.source import CheckpointSource
from ckptsync.publish import Publisher
from ckptsync.signing import generate
from ckptsync.store import open_store
from tests.envs.models import tiny_model
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.timeout(600)]


class Process:
    """A child whose stdout is read line by line."""

    def __init__(self, *command: str, env: dict[str, str] | None = None) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
        )

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline()

    def receipt(self) -> dict[str, Any]:
        return dict(json.loads(self.line()))

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        code = self.popen.wait(30)
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return code


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny_model(str(folder / str(seed)), seed) for seed in range(3)]


@pytest.fixture
def engine(models: list[str]) -> Iterator[str]:
    """The URL of an embedded server on its base weights."""
    server = Process("-m", "watchers.engines.embedded_server", models[0], "--port", "0")
    yield server.line().removeprefix("listening on ").strip()
    server.stop()


def answer(url: str) -> tuple[str, list[int]]:
    body = {"token_ids": [1, 2, 3, 4, 5], "max_new_tokens": 10}
    said = httpx.post(f"{url}/generate", json=body, timeout=60, trust_env=False).json()
    return said["version"], said["token_ids"]


def test_a_watcher_process_follows_a_signed_bucket_and_load_goes_back(
    engine, models, s3_root, s3_server, tmp_path
) -> None:
    key = str(tmp_path / "key")
    generate(key)
    command = ["--engine", "module", "--url", engine, "--stage", str(tmp_path / "stage"), "--json"]
    env = {**s3_server.environment, "CKPTSYNC_REQUIRE_SIGNATURE": key + ".pub"}
    with Publisher(open_store(s3_root.url, options=s3_root.options), sign_key=key) as publisher:
        publisher.publish(CheckpointSource(models[1]), assets=models[1])
        watch = Process("-m", "ckptsync.cli", "watch", s3_root.url, "--poll", "0.2", *command, env=env)
        first = watch.receipt()
        assert (first["state"], first["label"]) == ("serving", "e1-v1")
        label, tokens_of_1 = answer(engine)
        assert label == "e1-v1"
        publisher.publish(CheckpointSource(models[2]), assets=models[2])
        assert watch.receipt()["label"] == "e1-v2"
    label, tokens_of_2 = answer(engine)
    assert label == "e1-v2"
    assert tokens_of_2 != tokens_of_1
    assert watch.stop() == 0, "SIGTERM ends it in peace"
    assert answer(engine) == ("e1-v2", tokens_of_2), "the engine goes on serving"

    back = subprocess.run(
        [sys.executable, "-m", "ckptsync.cli", "load", s3_root.url, "1", *command],
        env={**os.environ, **env}, capture_output=True, text=True,
    )  # fmt: skip
    assert back.returncode == 0, back.stderr
    assert json.loads(back.stdout)["label"] == "e1-v1"
    assert answer(engine) == ("e1-v1", tokens_of_1)


def test_load_of_a_version_that_is_not_there_or_an_engine_that_is_away_is_exit_code_1(
    engine, models, s3_root, s3_server, tmp_path
) -> None:
    with Publisher(open_store(s3_root.url, options=s3_root.options)) as publisher:
        publisher.publish(CheckpointSource(models[1]))

    def load(version: str, url: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "ckptsync.cli",
            "load",
            s3_root.url,
            version,
            "--engine",
            "module",
            "--url",
            url,
        ]
        return subprocess.run(
            [*command, "--stage", str(tmp_path / "stage")],
            env={**os.environ, **s3_server.environment}, capture_output=True, text=True,
        )  # fmt: skip

    absent = load("9", engine)
    assert (absent.returncode, "no complete version 9" in absent.stderr) == (1, True), absent.stderr
    away = load("1", "http://127.0.0.1:9")
    assert away.returncode == 1
    assert "http://127.0.0.1:9" in away.stderr
    assert "Traceback" not in away.stderr


def test_a_terminal_shows_a_refused_version_once(engine, models, tmp_path) -> None:
    root, terminal = str(tmp_path / "root"), str(tmp_path / "terminal")
    with Publisher(root) as publisher:
        publisher.publish(CheckpointSource(models[1]))
        bad = publisher.publish(CheckpointSource(models[2])).manifest
    (name,) = {file.name for file in bad.tracks["model"].files if file.name.endswith(".safetensors")}
    with open(os.path.join(root, bad.folder, name), "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"flipped!")
    command = [
        "watch",
        root,
        "--engine",
        "module",
        "--url",
        engine,
        "--stage",
        str(tmp_path / "stage"),
        "--poll",
        "0.1",
    ]
    with open(terminal, "w") as output:
        watch = subprocess.Popen([sys.executable, "-m", "ckptsync.cli", *command], stdout=output, stderr=output)
        try:
            until(lambda: "e1-v1 serving" in open_text(terminal), 120, "the good version is served")
        finally:
            watch.send_signal(signal.SIGTERM)
            assert watch.wait(30) == 0
    shown = open_text(terminal)
    assert shown.startswith(f"found e1-v2 in {root}: staging it, unless it is served already\n")
    assert shown.count("e1-v2 refused") == 1
    assert shown.count(name) == 1, shown


def open_text(path: str) -> str:
    with open(path) as file:
        return file.read()
