"""A script that is killed at each of its store operations, one run for each: what does it leave behind?

    def script(store):                        # at the top of a module, so that a new process finds it
        with Publisher(store) as publisher:
            publisher.publish(weights)

    for crash in crash_points(script, fresh_root):
        assert my_reader_is_happy(crash.root), crash

A process dies with SIGKILL and gets to do nothing about it: no `finally`, no `atexit`. `just_before` may do worse to
the storage at that moment (`power.cut`).
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import NamedTuple

from ..errors import InvalidInput
from ..store import open_store
from ..store.base import Store
from .hooks import Crashing, HookedStore, Recorder

Script = Callable[[Store], object]
"""Does the same each time, as far as its changes to the store go. Picklable: a function of a module, or a partial."""


class CrashPoint(NamedTuple):
    """A run that was killed before its `at`-th change, counted from 0: the `operation` on `path`; see
    `hooks.CHANGES`."""

    at: int
    operation: str
    path: str
    root: str
    """What it left."""


def crash_points(
    script: Script,
    fresh: Callable[[], str],
    *,
    open: Callable[[str], Store] = open_store,
    just_before: Callable[[], object] | None = None,
    seconds: float = 120.0,
    context: BaseContext | None = None,
) -> Iterator[CrashPoint]:
    """Kill the script before every change it makes to the store, each time on a fresh root.

    `fresh` makes a root as it is before the script, and is called once more, for a run in this process that is not
    killed: what it raises is raised. `open` opens a root in the new process (picklable too). `context`: processes of
    yours; by default forked from a server that has imported the script's module and
    the publisher.

    InvalidInput if a run makes fewer changes than the first one did; TimeoutError if one goes on for `seconds`.
    """
    for at, (operation, path) in enumerate(changes_of(script, open(fresh()))):
        root = fresh()
        hit = killed_at(
            script, root, at, open=open, just_before=just_before, seconds=seconds, context=context,
        )  # fmt: skip
        if not hit:
            raise InvalidInput(f"{script} came to its end before its change {at}, {operation} {path}: it must do the "
                               "same each time, and raise nothing")  # fmt: skip
        yield CrashPoint(at, operation, path, root)


def changes_of(script: Script, store: Store) -> list[tuple[str, str]]:
    """Run the script here, to its end: the (operation, path) of each change, in order."""
    recorder = Recorder()
    script(HookedStore(store, recorder))
    return recorder.changes()


def killed_at(
    script: Script,
    root: str,
    at: int,
    *,
    open: Callable[[str], Store] = open_store,
    just_before: Callable[[], object] | None = None,
    seconds: float = 120.0,
    context: BaseContext | None = None,
) -> bool:
    """Run the script in a process of its own that is killed before its `at`-th change, counted from 0. False if it
    came to its end, or raised, before that. TimeoutError if it goes on for `seconds`."""
    processes = context or _processes(script)
    process = processes.Process(target=_run, args=(script, open, root, at, just_before), daemon=True)  # type: ignore[attr-defined]
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{script} was still running after {seconds:g} s")
    return bool(process.exitcode == -signal.SIGKILL)


def _run(
    script: Script, open: Callable[[str], Store], root: str, at: int, just_before: Callable[[], object] | None
) -> None:
    script(HookedStore(open(root), Crashing(at, just_before=just_before)))


def _processes(script: Script) -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    # The second is what takes seconds to import, and the first may be found by the children's path only.
    context.set_forkserver_preload([getattr(script, "func", script).__module__, "ckptsync.publish"])
    return context
