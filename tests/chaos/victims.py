"""Processes that are killed with SIGKILL, whole groups at a time, and started again on the same port."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.engines.conftest import free_port, serve

from .nets import Host


@dataclass
class Victim:
    """One process. `start` does not wait until it serves: that is for others to cope with. `log` has what it says on
    stderr, and `said` what it prints."""

    name: str
    argv: Sequence[str]
    log: str
    env: Mapping[str, str] = field(default_factory=dict)
    said: str = ""
    ended_by_itself: bool = False
    """Before one of its kills."""
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "ab") as log, open(self.said or self.log, "ab") as said:
            self._process = subprocess.Popen(
                self.argv, env={**os.environ, **self.env}, stdout=said, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self.ended_by_itself = self.ended_by_itself or process.poll() is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def last_words(self, lines: int = 12) -> str:
        """Its name, its exit code if it has one, and the end of its log."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            said = file.read().splitlines()[-lines:]
        return "\n".join([f"--- {self.name}, exit code {self.ended()}", *(line[:300] for line in said)])

    def freeze(self) -> None:
        """It comes back with what it believed before."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def ended(self) -> int | None:
        """The exit code, if it ended by itself."""
        return None if self._process is None else self._process.poll()

    @property
    def killed(self) -> bool:
        return self._process is None

    def _signal(self, sign: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                os.killpg(self._process.pid, sign)


def embedded(name: str, folder: str, log: str, host: Host) -> tuple[Victim, str]:
    port = free_port()
    server = [sys.executable, "-m", "watchers.engines.embedded_server", folder]
    argv = [*host.prefix, *server, "--host", host.address, "--port", str(port)]
    return Victim(name, argv, log), f"http://{host.address}:{port}"


def real(engine: str, folder: str, log: str, host: Host) -> tuple[Victim, str]:
    port = free_port()
    argv = [*host.prefix, *serve.command(engine, folder, port, ["--host", host.address])]
    return Victim(engine, argv, log, serve.environment(engine)), f"http://{host.address}:{port}"


def watcher(name: str, root: str, logs: str, env: Mapping[str, str], host: Host, *options: str) -> Victim:
    command = [sys.executable, "-m", "ckptsync.cli", "watch", root, "--poll", "0.5", "--json", "--reader", name]
    return Victim(name, [*host.prefix, *command, *options], f"{logs}/{name}.log", env, f"{logs}/{name}.json")


def mirror(name: str, source: str, target: str, logs: str, env: Mapping[str, str], host: Host) -> Victim:
    """Keeps the last eight versions."""
    command = [sys.executable, "-m", "ckptsync.cli", "mirror", source, target, "--follow", "--poll", "0.5", "--json"]
    options = ["--keep-last", "8", "--grace", "5s"]
    return Victim(name, [*host.prefix, *command, *options], f"{logs}/{name}.log", env, f"{logs}/{name}.json")
