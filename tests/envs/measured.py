"""Measures processes that coverage does not reach by itself, if the tests are measured: scripts in an engine's
environment, which has no coverage and borrows that of the tests; Ray's workers, which are killed at their end; and
uvicorn, which ends itself by the signal that ended it.

A script is started with `environment()` beside its own, and says `start()` first. `on_path` is for whoever is killed.
Servers of engines are left out: what runs in them alone counts as not run.
"""

from __future__ import annotations

import os
import sys

PLACE = "CKPTSYNC_TEST_COVERAGE"

OFTEN = """
import os
import sys
import threading
import time

if os.environ.get("COVERAGE_PROCESS_CONFIG"):
    sys.path.insert(0, {place!r})
    import coverage

    sys.path.remove({place!r})
    coverage.process_startup()

    def save():
        while True:
            time.sleep(0.5)
            coverage.Coverage.current().save()

    threading.Thread(target=save, daemon=True).start()
"""


def environment() -> dict[str, str]:
    """Where coverage is, if this process is measured."""
    return {PLACE: _place()} if "COVERAGE_PROCESS_CONFIG" in os.environ else {}


def start() -> None:
    if PLACE in os.environ:
        sys.path.insert(0, os.environ[PLACE])
        import coverage

        sys.path.remove(os.environ[PLACE])  # the other packages there are not the engine's
        coverage.process_startup()


def on_path(folder: str) -> str:
    """The folder, for PYTHONPATH: a Python that starts with it saves twice a second what it has run so far."""
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        with open(os.path.join(folder, "sitecustomize.py"), "w", encoding="utf-8") as file:
            file.write(OFTEN.format(place=_place()))
    return folder


def _place() -> str:
    import coverage

    return os.path.dirname(os.path.dirname(coverage.__file__))
