"""checkpoint-engine's parameter server in a process of its own, which is how it runs beside an inference engine.

Run as a module it is that process: one JSON line in, one out, or two for an update, whose first names the sockets that
the engine's workers are to connect to.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import socket
import subprocess
import sys
from types import TracebackType
from typing import Any, Self, TextIO

EXTENSION = "checkpoint_engine.worker.VllmColocateWorkerExtension"
CHECKPOINT = "version"


class CheckpointEngine:
    """The server, for as long as the block lasts; `folder`, in /dev/shm, has the files that it pins in place."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def start(self) -> None:
        """RuntimeError in its own words if it does not run here."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_checkpoint_engine"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, **rank},
        )  # fmt: skip
        self._ask(what="start")

    def stage(self, folder: str) -> None:
        """It removes the files that it pins in place, so it gets other names of them."""
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(folder, self._folder, copy_function=os.link)

    def register(self, *, inplace: bool) -> None:
        files = sorted(glob.glob(os.path.join(self._folder, "*.safetensors")))
        self._ask(what="register", files=files, inplace=inplace)

    def update(self, llm: Any) -> None:
        handles = self._ask(what="update")["handles"]
        llm.collective_rpc("update_weights_from_ipc", kwargs={"zmq_handles": dict(handles)})
        self._read()

    def cpu(self) -> float:
        """Seconds of its process so far."""
        if self._process is None:
            return 0.0
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _ask(self, **question: Any) -> Any:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("it was not started")
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        if self._process is None or self._process.stdout is None:
            raise RuntimeError("it was not started")
        line = self._process.stdout.readline()
        found = json.loads(line) if line else {"cannot": f"its process ended with {self._process.wait()}"}
        if "cannot" in found:
            raise RuntimeError(found["cannot"])
        return found


class Server:
    """In the process: the parameter server of one rank, and the one version that it holds."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def say(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)

    def start(self) -> None:
        from checkpoint_engine.ps import ParameterServer

        self._server = ParameterServer()

    def register(self, files: list[str], *, inplace: bool) -> None:
        self._server.unregister_checkpoint(CHECKPOINT)
        self._server.register_checkpoint(CHECKPOINT, files=files, use_inplace_pin_memory=inplace)
        self._server.gather_metas(CHECKPOINT)

    def update(self) -> None:
        self._server.update(CHECKPOINT, lambda handles: self.say(handles=handles))


def main() -> None:
    server = Server(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what libraries print is not an answer
    works = {"start": server.start, "register": server.register, "update": server.update}
    for line in sys.stdin:
        question = json.loads(line)
        try:
            works[question.pop("what")](**question)
            server.say()
        except Exception as error:  # noqa: BLE001 - any of theirs is an answer: this one does not run here
            server.say(cannot=f"{type(error).__name__}: {error}".splitlines()[0][:200])


if __name__ == "__main__":
    main()
