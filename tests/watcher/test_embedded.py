"""The embedded server as a real process: real weights, real generation, real kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from ckptsync.channel import Channel
from ckptsync.errors import EngineRefused, EngineUnavailable, ProofFailed, SchemaMismatch
from ckptsync.manifest import Manifest
from tests.envs import measured
from tests.envs.models import tiny_model
from tests.waiting import until
from watchers.engines.embedded import EmbeddedEngine
from watchers.stage import Stage
from watchers.watcher import Watcher

from .publish_folder import publish_folder

pytestmark = pytest.mark.slow

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


class Server:
    """One server process. `restart` brings it up again on the same port, with its base weights."""

    def __init__(self, folder: str, port: int = 0) -> None:
        command = [sys.executable, "-m", "watchers.engines.embedded_server", folder, "--port", str(port)]
        self.folder = folder
        path = [measured.on_path(os.path.dirname(folder)), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), line
        self.url = line.removeprefix("listening on ").strip()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def generate(self, **body: Any) -> dict[str, Any]:
        body = {"token_ids": PROMPT, "max_new_tokens": 12, **body}
        answer = httpx.post(self.url + "/generate", json=body, timeout=60, trust_env=False)
        return dict(answer.json())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The base model, and three versions of it."""
    folder = tmp_path_factory.mktemp("models")
    return [tiny_model(str(folder / str(seed)), seed, tied=True) for seed in range(4)]


@pytest.fixture
def serve(models: list[str]) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(folder: str = models[0], port: int = 0) -> Server:
        servers.append(Server(folder, port))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def server(models: list[str]) -> Iterator[Server]:
    """One for the tests that leave it as it was."""
    shared = Server(models[0])
    yield shared
    shared.close()


@pytest.fixture
def watcher_of(root: str, tmp_path: Any) -> Iterator[Callable[..., Watcher]]:
    made: list[Watcher] = []

    def make(server: Server, **options: Any) -> Watcher:
        engine = EmbeddedEngine(server.url, timeout=30)
        made.append(Watcher(root, engine, stage=str(tmp_path / "stage"), reader="embedded", poll=0.05, **options))
        return made[-1]

    yield make
    for watcher in made:
        watcher.engine.close()
        watcher.close()


def test_going_back_and_forward_gives_the_tokens_of_a_fresh_server_on_that_folder(
    serve: Callable[..., Server], watcher_of: Callable[..., Watcher], models: list[str], root: str
) -> None:
    server = serve()
    base = server.generate()
    assert base["version"] == ""
    manifests = [publish_folder(root, model) for model in models[1:]]
    watcher, tokens = watcher_of(server), {}
    for manifest in [*manifests, manifests[0], manifests[2]]:
        receipt = watcher.load_version(manifest.id.label)
        answer = server.generate()
        assert receipt.label == answer["version"] == manifest.id.label
        assert tokens.setdefault(manifest.id, answer["token_ids"]) == answer["token_ids"]
    assert len({tuple(t) for t in tokens.values()} | {tuple(base["token_ids"])}) == 4
    fresh = serve(os.path.join(root, manifests[0].folder))
    assert fresh.generate()["token_ids"] == tokens[manifests[0].id]


def test_a_request_waits_while_paused_and_then_comes_from_one_version(
    serve: Callable[..., Server], watcher_of: Callable[..., Watcher], models: list[str], root: str
) -> None:
    server = serve()
    engine, answers = EmbeddedEngine(server.url), []
    engine.pause()
    threads = [threading.Thread(target=lambda: answers.append(server.generate())) for _ in range(50)]
    for thread in threads:
        thread.start()
    manifest = publish_folder(root, models[1])
    assert not answers
    assert watcher_of(server).load_version("latest").state == "serving"
    for thread in threads:
        thread.join(60)
    assert [answer["version"] for answer in answers] == [manifest.id.label] * 50
    engine.close()


def test_an_engine_killed_in_mid_load_and_started_on_base_weights_is_current_before_it_is_ready(
    serve: Callable[..., Server], watcher_of: Callable[..., Watcher], models: list[str], root: str
) -> None:
    server = serve()
    publish_folder(root, models[1])
    ready: list[str] = []
    watcher = watcher_of(server, on_change=lambda health: ready.append(health.version) if health.ready else None)
    assert watcher.step() is not None
    expected = server.generate()
    second = publish_folder(root, models[2])
    kill_at_update(watcher.engine, server)
    receipt = watcher.step()
    assert receipt is not None
    assert receipt.state == "dirty"
    assert not watcher.health.ready
    again = serve(port=server.port)
    assert again.generate()["version"] == ""
    ready.clear()
    receipt = watcher.step()
    assert receipt is not None
    assert receipt.label == "e1-v1"
    assert set(ready) == {"e1-v1"}
    assert again.generate() == expected
    until(lambda: watcher.step() is not None)
    assert again.generate()["version"] == second.id.label


def kill_at_update(engine: Any, server: Server) -> None:
    """The server process dies with the load request on its way."""
    update = engine.update

    def killed(version: Any) -> None:
        server.kill()
        engine.update = update
        update(version)

    engine.update = killed


def test_the_server_refuses_what_does_not_fit_and_goes_on_serving(server: Server, root: str, tmp_path: Any) -> None:
    before, engine = server.generate(), EmbeddedEngine(server.url)
    wider = tiny_model(str(tmp_path / "wider"), 1, tied=True, intermediate_size=512)
    manifest = publish_folder(root, wider)
    version = Stage(str(tmp_path / "stage")).stage(Channel.open(root), manifest)
    with pytest.raises(EngineRefused, match="not paused"):
        engine.start(version)
    engine.pause()
    engine.start(version)
    with pytest.raises(SchemaMismatch, match="of another shape"):
        engine.update(version)
    with pytest.raises(ProofFailed):
        engine.confirm(version)
    engine.resume()
    assert server.generate() == before
    engine.close()


def test_what_is_not_a_staged_version_is_refused(server: Server, models: list[str], root: str) -> None:
    folders = {"/nonexistent": "not a staged version", models[1]: "not a staged version"}
    manifest: Manifest = publish_folder(root, models[1])
    folders[os.path.join(root, manifest.folder)] = "holds e1-v1, not e9-v9"
    for folder, reason in folders.items():
        body = {"folder": folder, "label": "e9-v9"}
        answer = httpx.post(server.url + "/load", json=body, timeout=30, trust_env=False)
        assert answer.status_code == 409
        assert reason in answer.json()["message"]


def test_bad_requests_are_told_so(server: Server) -> None:
    for body in ({}, {"prompt": 5}, {"surprise": 1}):
        answer = httpx.post(server.url + "/generate", json=body, timeout=30, trust_env=False)
        assert 400 <= answer.status_code < 500
        assert answer.json()["message"]


def test_scores_are_told_of_given_tokens_and_not_of_the_first(server: Server) -> None:
    engine = EmbeddedEngine(server.url)
    tokens = engine.generate(PROMPT, 4)
    scores = engine.score([*PROMPT, *tokens], len(PROMPT))
    assert len(scores) == len(tokens)
    assert all(score <= 0 for score in scores)
    for wrong in ({"token_ids": [1, 2], "first": 0}, {"token_ids": [1, 10**6], "first": 1}):
        answer = httpx.post(server.url + "/score", json=wrong, timeout=30, trust_env=False)
        assert 400 <= answer.status_code < 500
    engine.close()


def test_a_prompt_is_answered_with_text(server: Server) -> None:
    answer = server.generate(token_ids=[], prompt="hello")
    assert answer["text"]
    assert answer["token_ids"]


def test_a_server_that_is_not_there_is_unavailable() -> None:
    engine = EmbeddedEngine("http://127.0.0.1:9", timeout=2)
    with pytest.raises(EngineUnavailable, match="/status"):
        engine.status()
    engine.close()


def test_it_stops_at_once_though_requests_wait_at_a_pause(serve: Callable[..., Server]) -> None:
    server = serve()
    engine = EmbeddedEngine(server.url)
    engine.pause()
    engine.close()
    waiting = threading.Thread(target=lambda: _ignore(server.generate))
    before = psutil.Process(server.process.pid).num_threads()
    waiting.start()
    # Only a request at the gate has the thread that generates.
    until(lambda: psutil.Process(server.process.pid).num_threads() > before, what="a request waits")
    server.process.terminate()
    assert server.process.wait(60) is not None
    waiting.join(60)


def _ignore(call: Callable[[], object]) -> None:
    try:
        call()
    except (httpx.HTTPError, ValueError):
        return


def test_sampled_tokens_come_with_the_log_probabilities_that_the_model_gives_them(server: Server) -> None:
    found = [server.generate(temperature=1.0) for _ in range(3)]
    assert len({tuple(answer["token_ids"]) for answer in found}) > 1
    engine = EmbeddedEngine(server.url)
    for answer in [*found, server.generate()]:
        assert len(answer["logprobs"]) == len(answer["token_ids"])
        scored = engine.score(PROMPT + answer["token_ids"], len(PROMPT))
        assert answer["logprobs"] == pytest.approx(scored, abs=0.05)
    engine.close()
