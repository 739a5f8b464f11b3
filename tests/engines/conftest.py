"""Real engine servers for tests: started once per session, on free ports, killed as whole process groups.

`vllm_server`, `sglang_server` and, for fleets, `second_sglang` start on version A of a tiny model. `started_on_b` is
one on version B, for "its tokens equal those of a fresh server"; `fresh_server` starts one more, on any folder. Only
one server starts at a time on a machine, also between two pytest runs: a start is mostly imports, and two at once take
more than twice as long.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx
import psutil
import pytest

from ckptsync.engine import Confirmation, Engine, StagedVersion
from ckptsync.manifest import FileEntry, Manifest, TensorEntry, Track
from tests.waiting import until

from .faked import fake_sglang, fake_vllm, sglang, vllm

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "envs"))

import make
import models
import serve

__all__ = ["fake_sglang", "fake_vllm", "sglang", "vllm"]

START_SECONDS = 400
READY = {"vllm": "/health", "sglang": "/ready"}
PROMPTS = ([1, 2, 3, 4, 5], [200, 100, 50, 25], [7 * i % 251 for i in range(400)])
"""The last is longer than a block of vLLM's prefix cache, 128 tokens on a CPU: a stale prefix would show."""

ENDLESS = {"vllm": 130_000, "sglang": 65_000}
"""Tokens of a request that is still running whatever else happens: minutes at the highest rates seen on a CPU, which
are about 700 and 130 a second. It ends by `abort`."""

ROOM = {
    "vllm": ("--max-model-len", "131072"),
    "sglang": ("--context-length", "65536", "--max-total-tokens", "65536", "--max-running-requests", "16"),
}
"""What a server of the tiny model is started with to take it: 64 MiB of SGLang's cache, 64 MiB of vLLM's."""

Start = Callable[..., "Server"]
AnyEngine = TypeVar("AnyEngine", bound=Engine)
_started: list[Server] = []
"""Servers that are up; the tail of their logs is shown with every failure."""


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
        """End the whole process group: an engine that was killed alone leaves its workers behind. SGLang is not asked
        first, since it looks up every 5 s only."""
        if self.process is None:
            return
        queues = queues_of(self.process.pid)
        asked = [] if self.engine == "sglang" else [(signal.SIGTERM, 10.0)]
        for sign, seconds in (*asked, (signal.SIGKILL, 30.0)):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(seconds)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self.process.wait(0)
        self.process = None
        for path in filter(os.path.exists, queues):
            os.unlink(path)

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
    def running_request(self) -> Iterator[Iterator[str]]:
        """The parts of a streamed completion that is certainly being computed, since the first has arrived, and goes
        on until `abort`. A server with `ROOM` for it."""
        path, body = self.request([7, 8, 9], ENDLESS[self.engine], stream=True)
        with httpx.stream("POST", self.url + path, json=body, timeout=120) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            next(lines)
            yield lines

    def abort(self) -> None:
        """Every request ends here, with what it has."""
        path, body = {"vllm": ("/abort_requests", {}), "sglang": ("/abort_request", {"abort_all": True})}[self.engine]
        httpx.post(self.url + path, json=body, timeout=60).raise_for_status()

    def log_tail(self, lines: int = 60) -> str:
        with open(self.log, encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-lines:])


def queues_of(pid: int) -> set[str]:
    """What vLLM's processes share in memory, 250 MB: a fork leaves it there, and so does one that is killed."""
    found: set[str] = set()
    with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with open(f"/proc/{process.pid}/maps", encoding="utf-8") as maps:
                found |= {line.split()[5] for line in maps if "/dev/shm/psm_" in line}
    return found


def aborted_at(label: str, lines: Iterator[str], *servers: Server) -> dict[str, Any]:
    """What SGLang says of the request whose parts these are, aborted when it has computed tokens with that version."""
    metas = (json.loads(line.removeprefix("data: "))["meta_info"] for line in lines)
    assert any(meta["weight_version"] == label for meta in metas), f"it ended before {label}"
    for _ in range(5):
        next(metas)  # a token that was computed before may have been told only now
    for server in servers:
        server.abort()
    *_, last = metas
    assert last["finish_reason"]["type"] == "abort"
    return dict(last)


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


def load(engine: Engine, version: StagedVersion) -> Confirmation:
    """A whole change of version, as the contract has it."""
    engine.pause()
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    confirmation = engine.confirm(version)
    engine.resume()
    return confirmation


@contextmanager
def left_serving(engine: AnyEngine) -> Iterator[AnyEngine]:
    """Resumed and closed at the end: a test that failed half way leaves the next one an engine that serves."""
    yield engine
    if engine.status().paused:
        engine.resume()
    engine.close()


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StagedVersion]:
    """Two versions of one tiny Qwen3, `a` and `b`."""
    base = tmp_path_factory.mktemp("versions")
    pairs = (("a", 1), ("b", 2))
    return {name: staged(models.tiny_model(str(base / name), number), number) for name, number in pairs}


def _end_session(signum: int, frame: object) -> None:
    pytest.exit("terminated: the engine servers are stopped first", returncode=128 + signum)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _starter(base: Any, stack: ExitStack) -> Start:
    # The servers have sessions of their own: a pytest that is terminated must end them itself.
    signal.signal(signal.SIGTERM, _end_session)

    def start(engine: str, folder: str, *extra: str) -> Server:
        port = free_port()
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
        start = _starter(tmp_path_factory.mktemp("vllm"), stack)
        yield start("vllm", versions["a"].folder, *ROOM["vllm"], "--enable-scale-out")


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, StagedVersion]) -> Iterator[Server]:
    """An SGLang server, started on version `a`. Tests leave it serving, whatever version it holds."""
    with ExitStack() as stack:
        yield _starter(tmp_path_factory.mktemp("sglang"), stack)("sglang", versions["a"].folder, *ROOM["sglang"])


@pytest.fixture(scope="package")
def second_sglang(tmp_path_factory: pytest.TempPathFactory, versions: dict[str, StagedVersion]) -> Iterator[Server]:
    """One more replica, which ends with the tests of this folder."""
    with ExitStack() as stack:
        yield _starter(tmp_path_factory.mktemp("sglang"), stack)("sglang", versions["a"].folder, *ROOM["sglang"])


class Started(NamedTuple):
    server: Server
    tokens: list[list[int]]
    """What it answered before anything was loaded into it."""


OTHER_FLAGS = {
    "vllm": ("--weight-transfer-config", '{"backend": "ipc"}'),
    "sglang": ("--admin-api-key", "secret"),
}
"""What some tests need of a server, and no test wants it without."""


@pytest.fixture(scope="package")
def started_on_b(
    tmp_path_factory: pytest.TempPathFactory, versions: dict[str, StagedVersion]
) -> Iterator[Callable[[str], Started]]:
    """`started_on_b("vllm")`: a server that was started on version `b`. Tests leave it serving, whatever it holds."""
    found: dict[str, Started] = {}
    with ExitStack() as stack:
        start = _starter(tmp_path_factory.mktemp("b"), stack)

        def started(engine: str) -> Started:
            if engine not in found:
                server = start(engine, versions["b"].folder, *OTHER_FLAGS[engine])
                found[engine] = Started(server, server.tokens())
            return found[engine]

        yield started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        for server in _started:
            report.sections.append((f"log of {server.engine} at {server.url}", server.log_tail()))
    return report
