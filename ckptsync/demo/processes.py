"""The demo's child processes: each in its own group, its output in a file, gone at the end whatever happens."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import EngineUnavailable


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """One process. Its stderr goes to `log`; its stdout lines, where they are JSON objects, arrive in `events`."""

    def __init__(self, name: str, command: list[str], log: str, env: dict[str, str] | None = None) -> None:
        self.name, self.log = name, log
        self.events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=file,
                env=env or dict(os.environ),
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream = self.process.stdout
        if stream is None:
            return
        with open(self.log, "ab") as log:
            for line in stream:
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if isinstance(row, dict):
                    self.events.put(row)
                else:
                    log.write(line)

    def check(self) -> None:
        """Raise with the end of the log if the process failed."""
        if self.process.poll():
            raise RuntimeError(f"the {self.name} ended with code {self.process.returncode}:\n{tail(self.log)}")

    def stop(self) -> None:
        """SIGTERM to the whole group, SIGKILL after 10 s."""
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sig)
            except ProcessLookupError:
                break
            try:
                self.process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
        self._reader.join(timeout=5)


def tail(path: str, count: int = 30) -> str:
    """The last lines of a log."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return "".join(file.readlines()[-count:])


def wait_until(ready: Callable[[], bool], child: Child, seconds: float) -> None:
    """Poll `ready` until it is true. Raises if the child dies or the time is over."""
    deadline = time.monotonic() + seconds
    while not ready():
        child.check()
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"the {child.name} was not ready after {seconds:.0f} s:\n{tail(child.log)}")
        time.sleep(0.2)
