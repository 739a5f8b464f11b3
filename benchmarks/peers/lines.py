"""A process that is asked in lines: one JSON object in, and one out, {"cannot": why} if it failed there.

Only the standard library, since processes of other environments import it too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO


class Cannot(Exception):
    """A peer that does not run here, in its own words."""


class Process:
    """The side that asks."""

    def __init__(self, command: list[str], environment: Mapping[str, str], folder: str | None = None) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder,
            env={**os.environ, **environment},
        )  # fmt: skip
        self.pid = self._process.pid

    def ask(self, what: str, **arguments: Any) -> Any:
        """Its answer. Cannot if it failed there."""
        print(json.dumps({"what": what, **arguments}), file=self._process.stdin, flush=True)
        return self.read()

    def read(self) -> Any:
        """The next answer, of a question that has several."""
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise Cannot(f"its process ended with {self._process.wait()}")
        found = json.loads(line)
        if "cannot" in found:
            raise Cannot(found["cannot"])
        return found

    def close(self) -> None:
        """It ends with its input."""
        self._process.communicate()

    def kill(self) -> None:
        self._process.kill()
        self.close()


def answers() -> TextIO:
    """Where answers go from here on; what libraries print goes to stderr."""
    there = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return there


def say(there: TextIO, **answer: Any) -> None:
    print(json.dumps(answer), file=there, flush=True)


def serve(works: Mapping[str, Callable[..., dict[str, Any] | None]], there: TextIO) -> None:
    """The side that answers, until its input ends."""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = works[question.pop("what")](**question) or {}
        except Exception as error:  # noqa: BLE001 - any of theirs is an answer: this one does not run here
            answer = {"cannot": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        say(there, **answer)
