"""Real engine servers for tests: started once per session, on free ports, killed as whole process groups.

`vllm_server` and `sglang_server` start on version A of a tiny model. `fresh_server` starts one more, on any
folder, for "its tokens equal those of a fresh server". Only one server starts at a time on a machine, also
between two pytest runs: a start is mostly imports, and two at once take more than twice as long.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from ckptsync.engine import StagedVersion
from ckptsync.manifest import FileEntry, Manifest, TensorEntry, Track

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "envs"))

import make
import models
import serve

START_SECONDS = 400
READY = {"vllm": "/health", "sglang": "/ready"}
PROMPTS = ([1, 2, 3, 4, 5], [200, 100, 50, 25], [7 * i % 251 for i in range(400)])
"""The last is longer than a block of vLLM's prefix cache, 128 tokens on a CPU: a stale prefix would show."""

Start = Callable[..., "Server"]
_started: list[Server] = []
"""Servers that are up; the tail of their logs is shown with every failure."""


def until(check: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for a condition, with a deadline that names it."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


@dataclass
class Server:
    """One engine server process, and what a client does with it."""

    engine: str
    folder: str
    log: str
    port: int
    extra: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        argv = serve.command(self.engine, self.folder, self.port, self.extra)
        os.makedirs(make.cache_dir(), exist_ok=True)
        with make.locked(os.path.join(make.cache_dir(), "engine-start.lock")), open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                argv, env=serve.environment(self.engine), stdout=log, stderr=log, start_new_session=True
            )
            until(self._ready, START_SECONDS, f"{self.engine} is ready")

    def _ready(self) -> bool:
        if self.process is None or self.process.poll() is not None:
            pytest.fail(f"{self.engine} died while starting")
        try:
            return httpx.get(self.url + READY[self.engine], timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """End the whole process group: an engine that was killed alone leaves its workers behind."""
        if self.process is None:
            return
        for sign, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 30.0)):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self.process.wait(0)
        self.process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def tokens(self) -> list[list[int]]:
        """Greedy token ids for each of the prompts."""
        return [self._complete(prompt, 16) for prompt in PROMPTS]

    def _complete(self, prompt: list[int], count: int) -> list[int]:
        path, body = self.request(prompt, count)
        response = httpx.post(self.url + path, json=body, timeout=120)
        assert response.status_code == 200, response.text
        answer = response.json()
        return answer["choices"][0]["token_ids"] if self.engine == "vllm" else answer["output_ids"]

    def request(self, prompt: list[int], count: int, **more: object) -> tuple[str, dict[str, Any]]:
        """Path and body of a greedy completion of exactly `count` tokens."""
        greedy = {"temperature": 0, "ignore_eos": True}
        if self.engine == "vllm":
            body = {
                "model": "m",
                "prompt": prompt,
                "max_tokens": count,
                "return_token_ids": True,
                **greedy,
                **more,
            }
            return "/v1/completions", body
        sampling = {"max_new_tokens": count, **greedy}
        return "/generate", {"input_ids": prompt, "sampling_params": sampling, **more}

    @contextmanager
    def running_request(self, count: int) -> Iterator[Iterator[str]]:
        """A streamed completion of which the first part has arrived, so that it is certainly being
        computed."""
        path, body = self.request([7, 8, 9], count, stream=True)
        with httpx.stream("POST", self.url + path, json=body, timeout=120) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            next(lines)
            yield lines

    def log_tail(self, lines: int = 60) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-lines:])


def staged(folder: str, number: int) -> StagedVersion:
    """A plain Hugging Face folder as a staged version, with a manifest made by hand."""
    from watchers.engines._schema import folder_schema

    names = [name for name in os.listdir(folder) if name.endswith(".safetensors")] if os.path.isdir(folder) else []
    files = tuple(FileEntry(name=n, size=os.path.getsize(os.path.join(folder, n)), digest="") for n in names)
    tensors = tuple(
        TensorEntry(name=spec.name, dtype=spec.dtype, shape=spec.shape, digest="")
        for spec in (folder_schema(folder) or {}).values()
    )
    manifest = Manifest(
        channel_id="c",
        epoch=1,
        number=number,
        nonce="n",
        run_id="r",
        created=0.0,
        digest="xxh3-128",
        content_digest="",
        tracks={"model": Track(files=files, tensors=tensors)},
    )
    return StagedVersion(manifest=manifest, folder=folder)


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StagedVersion]:
    """Two versions of one tiny Qwen3, `a` and `b`."""
    base = tmp_path_factory.mktemp("versions")
    pairs = (("a", 1), ("b", 2))
    return {name: staged(models.tiny_model(str(base / name), number), number) for name, number in pairs}


def _end_session(signum: int, frame: object) -> None:
    pytest.exit("terminated: the engine servers are stopped first", returncode=128 + signum)


def _starter(base: Any, stack: ExitStack) -> Start:
    # The servers have sessions of their own: a pytest that is terminated must end them itself.
    signal.signal(signal.SIGTERM, _end_session)

    def start(engine: str, folder: str, *extra: str) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = Server(engine, folder, str(base / f"{engine}-{port}.log"), port, list(extra))
        _started.append(server)
        stack.callback(_started.remove, server)
        stack.callback(server.stop)
        server.start()
        return server

    return start


@pytest.fixture
def fresh_server(tmp_path: Any) -> Iterator[Start]:
    """`fresh_server("vllm", folder)` starts one more server; it ends with the test."""
    with ExitStack() as stack:
        yield _starter(tmp_path, stack)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, StagedVersion]) -> Iterator[Server]:
    """A vLLM server, started on version `a`. Tests leave it serving, whatever version it holds."""
    with ExitStack() as stack:
        yield _starter(tmp_path_factory.mktemp("vllm"), stack)("vllm", versions["a"].folder, "--max-model-len", "4096")


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, StagedVersion]) -> Iterator[Server]:
    """An SGLang server, started on version `a`. Tests leave it serving, whatever version it holds."""
    with ExitStack() as stack:
        yield _starter(tmp_path_factory.mktemp("sglang"), stack)("sglang", versions["a"].folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        for server in _started:
            report.sections.append((f"log of {server.engine} at {server.url}", server.log_tail()))
    return report
