"""checkpoint-engine's parameter server in a process of its own, which is how it runs beside an inference engine.

Run as a module it is that process: one JSON line in, one out, or two for an update, whose first names the sockets that
the engine's workers are to connect to.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import sys
from types import TracebackType
from typing import Any, Self, TextIO

from benchmarks.peers import lines

EXTENSION = "checkpoint_engine.worker.VllmColocateWorkerExtension"
CHECKPOINT = "version"


class CheckpointEngine:
    """The server, for as long as the block lasts; `folder`, in /dev/shm, has the files that it pins in place."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: lines.Process | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()

    def start(self) -> None:
        """Cannot, in its own words, if it does not run here."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._process = lines.Process([sys.executable, "-m", "benchmarks.gpu_checkpoint_engine"], rank)
        self._process.ask("start")

    def stage(self, folder: str) -> None:
        """It removes the files that it pins in place, so it gets other names of them."""
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(folder, self._folder, copy_function=os.link)

    def register(self, *, inplace: bool) -> None:
        files = sorted(glob.glob(os.path.join(self._folder, "*.safetensors")))
        self._started.ask("register", files=files, inplace=inplace)

    def update(self, llm: Any) -> None:
        handles = self._started.ask("update")["handles"]
        llm.collective_rpc("update_weights_from_ipc", kwargs={"zmq_handles": dict(handles)})
        self._started.read()

    def cpu(self) -> float:
        """Seconds of its process so far."""
        if self._process is None:
            return 0.0
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    @property
    def _started(self) -> lines.Process:
        if self._process is None:
            raise lines.Cannot("it was not started")
        return self._process


class Server:
    """In the process: the parameter server of one rank, and the one version that it holds."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers

    def start(self) -> None:
        from checkpoint_engine.ps import ParameterServer

        self._server = ParameterServer()

    def register(self, files: list[str], *, inplace: bool) -> None:
        self._server.unregister_checkpoint(CHECKPOINT)
        self._server.register_checkpoint(CHECKPOINT, files=files, use_inplace_pin_memory=inplace)
        self._server.gather_metas(CHECKPOINT)

    def update(self) -> None:
        self._server.update(CHECKPOINT, lambda handles: lines.say(self._answers, handles=handles))


def main() -> None:
    there = lines.answers()
    server = Server(there)
    lines.serve({"start": server.start, "register": server.register, "update": server.update}, there)


if __name__ == "__main__":
    main()
