"""A real vLLM 0.32 (CPU) with the plugin, in one process per fixture, and three versions of a tiny Qwen3."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from tests.vllm_plugin import overlay
from tests.watcher.publish_folder import publish_folder
from watchers.stage import Stage

import make  # isort: skip - found through overlay
import models  # isort: skip
import serve  # isort: skip

HERE = os.path.dirname(os.path.abspath(__file__))


class Failed(Exception):
    """The driver's answer was an error."""


class InProcess:
    """`engine.tokens()`, `engine.update(...)`: the methods of `inproc.Driver`, in a process of its own."""

    def __init__(self, path: str, log: str, options: dict[str, Any], extra: dict[str, str] | None = None) -> None:
        env = serve.environment("vllm") | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": path,
            **(extra or {}),
        }
        argv = [make.ensure("vllm"), os.path.join(HERE, "inproc.py"), json.dumps(options)]
        self.log = log
        with make.locked(os.path.join(make.cache_dir(), "engine-start.lock")), open(log, "ab") as file:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env=env, text=True
            )
            self._answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
            self.process.stdin.flush()
            return self._answer()

        return call

    def to(self, version: StagedVersion) -> dict[str, Any]:
        """Update through the plugin; the outcome, also of a failure."""
        with suppress(Failed):
            self.update(folder=version.folder, manifest_digest=version.manifest.manifest_digest, label=version.label)
        return self.outcome()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                pytest.fail("vLLM died:\n" + "".join(file.readlines()[-60:]))
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer.get("value")

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


Start = Callable[..., InProcess]


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return overlay.python_path(str(tmp_path_factory.mktemp("entry-points")))


def _starter(path: str, base: Any, stack: ExitStack) -> Start:
    def start(model: str, extra: dict[str, str] | None = None, **options: Any) -> InProcess:
        log = str(base / f"vllm-{len(os.listdir(base))}.log")
        config = {"weight_transfer_config": {"backend": "ckptsync"}}
        engine = InProcess(path, log, {"model": model, **config, **options}, extra)
        stack.callback(engine.stop)
        return engine

    return start


@pytest.fixture
def start_vllm(plugin_path: str, tmp_path: Any) -> Iterator[Start]:
    """`start_vllm(folder, **options)`: one more in-process vLLM, ended with the test."""
    with ExitStack() as stack:
        yield _starter(plugin_path, tmp_path, stack)


@pytest.fixture(scope="module")
def engine(plugin_path: str, tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str]) -> Iterator[InProcess]:
    """One vLLM for a module's tests, started on `a` by the stock loader."""
    with ExitStack() as stack:
        yield _starter(plugin_path, tmp_path_factory.mktemp("vllm"), stack)(folders["a"])


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
def versions(folders: dict[str, str], staged: Callable[[str], StagedVersion]) -> dict[str, StagedVersion]:
    return {name: staged(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def fresh_tokens(plugin_path: str, tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str]) -> Any:
    """What a vLLM that was started on that folder answers."""
    base, known = tmp_path_factory.mktemp("fresh"), {}

    def tokens(name: str, packed: bool = False) -> list[list[int]]:
        if (name, packed) not in known:
            with ExitStack() as stack:
                engine = _starter(plugin_path, base, stack)(folders[name], packed=packed)
                known[name, packed] = engine.tokens()
        return known[name, packed]

    return tokens
