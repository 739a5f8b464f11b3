"""The other environment's process, asked from here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.clock import Taken
from tests.envs import make

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


class Cannot(Exception):
    """A peer that does not run here, in its own words."""


class Elsewhere:
    """`benchmarks.peers.guest`, for as long as the block lasts. Its environment is made at the first use."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = environment or {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [make.ensure("peers"), "-m", "benchmarks.peers.guest"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
            env={**os.environ, **self._environment, "PYTHONPATH": ROOT},
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def ask(self, what: str, **arguments: Any) -> Taken:
        """Cannot if it failed there."""
        if self._process.stdin is None or self._process.stdout is None:
            raise Cannot("it was not started")
        print(json.dumps({"what": what, **arguments}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise Cannot(f"its process ended with {self._process.wait()}")
        found = json.loads(line)
        if "cannot" in found:
            raise Cannot(found["cannot"])
        return Taken(**found)

    def cannot(self, what: str, **arguments: Any) -> str:
        """Why it does not run here; empty if it does. Also loads its libraries, uncounted."""
        try:
            self.ask(what, **arguments)
        except Cannot as error:
            print(f"{what}: {error}", file=sys.stderr)
            return str(error)
        return ""
