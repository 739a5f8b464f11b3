"""A real vLLM 0.32 (CPU) with the plugin, in one process for all tests of this folder that need no other, and three
versions of a tiny Qwen3."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, TextIO

import pytest

from ckptsync.engine import StagedVersion
from tests.live.versions import broken, folders, staged, versions
from tests.vllm_plugin import overlay

import make  # isort: skip - found through overlay
import measured  # isort: skip
import serve  # isort: skip

__all__ = ["broken", "folders", "staged", "versions"]

HERE = os.path.dirname(os.path.abspath(__file__))


class Failed(Exception):
    """The driver's answer was an error."""


class Imported:
    """A process that has imported vLLM, and of which every vLLM of one process is a fork: 9 s less for each."""

    def __init__(self, path: str, log: str) -> None:
        env = serve.environment("vllm", {**os.environ, "PYTHONPATH": path}) | measured.environment()
        self.door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(log, "ab") as file:
            argv = [make.ensure("vllm"), os.path.join(HERE, "inproc.py")]
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            self.process = subprocess.Popen(argv, stdin=theirs, stdout=file, stderr=file, env=env)

    def fork(self, log: str, options: dict[str, Any]) -> tuple[TextIO, TextIO]:
        """Where its calls are written, and where its answers are read."""
        (reading, calls), (answers, writing) = os.pipe(), os.pipe()
        with open(log, "ab") as file:
            socket.send_fds(self.door, [json.dumps(options).encode()], [reading, writing, file.fileno()])
        for theirs in (reading, writing):
            os.close(theirs)
        return os.fdopen(calls, "w"), os.fdopen(answers)

    def stop(self) -> None:
        self.door.close()
        self.process.wait(60)


class InProcess:
    """`engine.tokens()`, `engine.update(...)`: the methods of `inproc.Driver`, in a process of its own."""

    def __init__(self, imported: Imported, log: str, options: dict[str, Any]) -> None:
        self.log = log
        with make.locked(os.path.join(make.cache_dir(), "engine-start.lock")):
            self.calls, self.answers = imported.fork(log, options)
            self._answer()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            print(json.dumps({"do": name, **arguments}), file=self.calls, flush=True)
            return self._answer()

        return call

    def to(self, version: StagedVersion) -> dict[str, Any]:
        """Update through the plugin; the outcome, also of a failure."""
        with suppress(Failed):
            self.update(folder=version.folder, manifest_digest=version.manifest.manifest_digest, label=version.label)
        return self.outcome()

    def _answer(self) -> Any:
        line = self.answers.readline()
        if not line:
            with open(self.log, encoding="utf-8", errors="replace") as file:
                pytest.fail("vLLM died:\n" + "".join(file.readlines()[-60:]))
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer.get("value")

    def stop(self) -> None:
        """It ends when nobody can call it any more; twice does no harm."""
        if self.calls.closed:
            return
        self.calls.close()
        self.answers.read()
        self.answers.close()


Start = Callable[..., InProcess]


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return overlay.python_path(str(tmp_path_factory.mktemp("entry-points")))


@pytest.fixture(scope="package")
def imported(plugin_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    imported = Imported(plugin_path, str(tmp_path_factory.mktemp("imported") / "log"))
    yield imported
    imported.stop()


def _starter(imported: Imported, base: Any, stack: ExitStack) -> Start:
    def start(model: str, **options: Any) -> InProcess:
        log = str(base / f"vllm-{len(os.listdir(base))}.log")
        config = {"weight_transfer_config": {"backend": "ckptsync"}}
        engine = InProcess(imported, log, {"model": model, **config, **options})
        stack.callback(engine.stop)
        return engine

    return start


@pytest.fixture
def start_vllm(imported: Imported, tmp_path: Any) -> Iterator[Start]:
    """`start_vllm(folder, **options)`: one more in-process vLLM, ended with the test."""
    with ExitStack() as stack:
        yield _starter(imported, tmp_path, stack)


@pytest.fixture(scope="package")
def known_tokens() -> dict[str, list[list[int]]]:
    """What a vLLM answered that was started on a folder, for those that were."""
    return {}


@pytest.fixture(scope="package")
def engine(
    imported: Imported, tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str], known_tokens: Any
) -> Iterator[InProcess]:
    """Started on `a` by the stock loader. Tests leave it serving, whatever version it holds."""
    with ExitStack() as stack:
        engine = _starter(imported, tmp_path_factory.mktemp("vllm"), stack)(folders["a"])
        known_tokens["a"] = engine.tokens()
        yield engine


@pytest.fixture(scope="package")
def fresh_tokens(
    imported: Imported, tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str], known_tokens: Any
) -> Any:
    """What a vLLM that was started on that folder answers."""
    base = tmp_path_factory.mktemp("fresh")

    def tokens(name: str) -> list[list[int]]:
        if name not in known_tokens:
            with ExitStack() as stack:
                known_tokens[name] = _starter(imported, base, stack)(folders[name]).tokens()
        return known_tokens[name]

    return tokens
