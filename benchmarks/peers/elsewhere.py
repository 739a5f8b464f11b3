"""The other environment's process, asked from here."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.clock import Taken
from benchmarks.peers.lines import Cannot, Process
from tests.envs import make

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


class Elsewhere:
    """`benchmarks.peers.guest`, for as long as the block lasts. Its environment is made at the first use."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = environment or {}

    def __enter__(self) -> Self:
        command = [make.ensure("peers"), "-m", "benchmarks.peers.guest"]
        self._process = Process(command, {**self._environment, "PYTHONPATH": ROOT}, ROOT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close()

    def ask(self, what: str, **arguments: Any) -> Taken:
        """Cannot if it failed there."""
        return Taken(**self._process.ask(what, **arguments))

    def cannot(self, what: str, **arguments: Any) -> str:
        """Why it does not run here; empty if it does. Also loads its libraries, uncounted."""
        try:
            self.ask(what, **arguments)
        except Cannot as error:
            print(f"{what}: {error}", file=sys.stderr)
            return str(error)
        return ""
