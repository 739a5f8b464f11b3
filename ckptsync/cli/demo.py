"""`ckptsync demo`: train, publish, watch, load and answer, in real processes on this machine."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Annotated, Any

import httpx
import typer
from rich.live import Live

from ..demo.ask import ask
from ..demo.board import Board
from ..demo.processes import Child, free_port, wait_until
from ..errors import InvalidInput
from ..store import LocalStore, open_store
from . import ls
from .needs import needs
from .output import out

SERVERS = {
    "module": [sys.executable, "-m", "watchers.engines.embedded_server"],
    "vllm": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--model"],
    "sglang": [sys.executable, "-m", "sglang.launch_server", "--model-path"],
}
HEALTH = {"module": "/status", "vllm": "/health", "sglang": "/health"}


def run(
    engine: Annotated[str, typer.Option(help="module (plain transformers), vllm or sglang.")] = "module",
    model: Annotated[str, typer.Option(help="A Hugging Face folder; SmolLM2-135M without one.")] = "",
    versions: Annotated[int, typer.Option(help="How many versions to train and publish.")] = 5,
    root: Annotated[str, typer.Option(help="Where to publish; a temporary folder without one.")] = "",
    serve: Annotated[str, typer.Option(help="Command that starts the engine; MODEL and --port are added.")] = "",
) -> None:
    """Two FSDP2 ranks train SmolLM2 and publish each step; a watcher loads every version into a live engine."""
    for module in ("torch", "transformers", "uvicorn"):
        needs(module, "embedded")
    if engine not in SERVERS:
        raise InvalidInput(f"--engine {engine} is not known: module, vllm or sglang")
    with ExitStack() as stack:
        work = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptsync-demo-"))
        root = root or os.path.join(work, "channel")
        _make(root)
        _Demo(stack, work, root, engine, model or _smollm2(), serve).play(versions)
        out.print()
        ls.run(root)


def _make(root: str) -> None:
    """The watcher starts before the trainer has made it."""
    store = open_store(root)
    if isinstance(store, LocalStore):
        os.makedirs(store.url, exist_ok=True)


def _smollm2() -> str:
    from ..demo.smollm2 import smollm2

    return smollm2()


class _Demo:
    """The processes of one demo run."""

    def __init__(self, stack: ExitStack, work: str, root: str, engine: str, model: str, serve: str) -> None:
        self.stack, self.work, self.root, self.engine, self.model = stack, work, root, engine, model
        self.serve = shlex.split(serve) if serve else SERVERS[engine]
        self.url = f"http://127.0.0.1:{free_port()}"
        self.board = Board(engine)

    def play(self, versions: int) -> None:
        with Live(self.board, console=out, refresh_per_second=4):
            self._start_engine()
            watcher = self._start("watcher", self._watch_command())
            trainer = self._start("trainer", self._train_command(versions), {"OMP_NUM_THREADS": "1"})
            served = ""
            while served != f"e1-v{versions}":
                served = self._turn(trainer, watcher) or served
            self.board.status = "every version was served; stopping"

    def _turn(self, trainer: Child, watcher: Child) -> str:
        """Take in what happened since the last turn; the label of a version that began to be served, if any."""
        time.sleep(0.1)
        trainer.check()
        watcher.check()
        while not trainer.events.empty():
            self.board.published(trainer.events.get())
        served = ""
        while not watcher.events.empty():
            served = self._on_receipt(watcher.events.get()) or served
        return served

    def _on_receipt(self, receipt: dict[str, Any]) -> str:
        self.board.loaded(receipt)
        if receipt["state"] != "serving":
            self.board.status = f"{receipt['version']}: {receipt['state']}: {receipt['error']}"
            return ""
        self.board.answered(receipt["version"], ask(self.engine, self.url))
        self.board.status = f"serving {receipt['version']}"
        return str(receipt["version"])

    def _start_engine(self) -> None:
        self.board.status = f"starting the {self.engine} engine"
        server = self._start("engine", [*self.serve, self.model, "--port", self.url.rpartition(":")[2]], _ENGINE_ENV)
        wait_until(self._engine_answers, server, 300)
        self.board.base_answer = ask(self.engine, self.url)
        self.board.status = "the trainer is starting"

    def _engine_answers(self) -> bool:
        try:
            return httpx.get(self.url + HEALTH[self.engine], timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _watch_command(self) -> list[str]:
        watch = [
            sys.executable,
            "-m",
            "ckptsync.cli",
            "watch",
            self.root,
            "--engine",
            self.engine,
            "--url",
            self.url,
        ]
        return [
            *watch,
            "--follow",
            "every",
            "--stage",
            os.path.join(self.work, "stage"),
            "--poll",
            "0.5",
            "--json",
        ]

    def _train_command(self, versions: int) -> list[str]:
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        run += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        return [
            *run,
            "-m",
            "ckptsync.demo.trainer",
            self.root,
            "--model",
            self.model,
            "--versions",
            str(versions),
        ]

    def _start(self, name: str, command: list[str], env: dict[str, str] | None = None) -> Child:
        child = Child(name, command, os.path.join(self.work, f"{name}.log"), {**os.environ, **(env or {})})
        self.stack.callback(child.stop)
        return child


_ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
