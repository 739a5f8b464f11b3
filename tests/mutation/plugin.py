"""Runs every selected test once for each mutant that it could kill, in one pytest session.

`mutmut` makes the mutants: each function of the modules becomes a switch between its original and its mutants, by
the environment. Its own runner starts pytest anew for each mutant, with every test that reaches it; half the suite
reaches `Channel.poll`. Here a test runs as it is first, which tells what it calls, and then, in a forked child, with
each mutant of that which is alive still, so that a mutant costs the milliseconds of the test that kills it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

LIVING, FATES = Path("living.json"), Path("fates.json")
"""Names of mutants in, and out; in `mutants/`, where the tests run."""

SECONDS = float(os.environ.get("CKPTSYNC_MUTATION_SECONDS", "10"))
"""Of processor time for one mutant, as its tests take without it: what outlives them has survived."""


class Mutants:
    """`alive`: the names of those that no test has killed. `fate`: how the others ended; empty while none did."""

    def __init__(self, alive: list[str]) -> None:
        self.alive = dict.fromkeys(alive, 0.0)
        self.fate: dict[str, list[str]] = {}
        self.reached = set[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        started, worked = time.monotonic(), time.process_time()
        called = _run_clean(item, nextitem)
        seconds = time.process_time() - worked
        item.add_marker(pytest.mark.timeout(5 + 10 * (time.monotonic() - started)), append=False)
        mine = [name for name in self.alive if name.partition("__mutmut_")[0] in called]
        self.reached.update(mine)
        self._try([name for name in mine if self.alive[name] + seconds <= SECONDS], seconds, item, nextitem)
        FATES.write_text(json.dumps({"fate": self.fate, "alive": self.alive, "reached": sorted(self.reached)}))
        return True

    def _try(self, names: list[str], seconds: float, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        while names:
            for name, fate in _in_child(names, item, nextitem):
                names.remove(name)
                self.alive[name] += seconds
                if fate != "survived":
                    del self.alive[name]
                    self.fate[name] = [fate, item.nodeid]


def _run_clean(item: pytest.Item, nextitem: pytest.Item | None) -> set[str]:
    """The functions that the test calls, of those that have mutants; none of one that fails as it is."""
    set_mutant_under_test("stats")
    state()._stats.clear()
    reports = runtestprotocol(item, nextitem=nextitem)
    set_mutant_under_test("")
    passed = all(report.passed for report in reports)
    return set(state()._stats) if passed else set()


def _in_child(names: list[str], item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[tuple[str, str]]:
    """Name and fate of each, up to the first that hangs: what it left running ends with the child. The caller takes out
    of `names` what is told. The test is stopped from inside at its own limit; hypothesis may try once more what was
    stopped, which nothing ends but a kill from outside."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        for name in names:
            set_mutant_under_test(name)
            fate = _fate(item, nextitem)
            os.write(writing, f"{name} {fate}\n".encode())
            if fate == "timeout":
                break
        os._exit(0)
    os.close(writing)
    told, hangs = _told(reading, 30 + 3 * item.get_closest_marker("timeout").args[0])  # type: ignore[union-attr]
    if hangs:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    yield from told
    if names and not (told and told[-1][1] == "timeout"):
        yield names[0], "timeout" if hangs else "died"


def _told(reading: int, patience: float) -> tuple[list[tuple[str, str]], bool]:
    """What the child says, and whether it said nothing for so many seconds."""
    said = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while ready := select.select([pipe], [], [], patience)[0]:
            if not (more := pipe.read(1 << 16)):
                break
            said += more
    return [(name, fate) for name, fate in map(str.split, said.decode().splitlines())], not ready


def _fate(item: pytest.Item, nextitem: pytest.Item | None) -> str:
    try:
        failed = [report for report in runtestprotocol(item, nextitem=nextitem, log=False) if report.failed]
    except BaseException:
        return "killed"
    if any("Timeout (>" in report.longreprtext for report in failed):
        return "timeout"
    return "killed" if failed else "survived"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Mutants(json.loads(LIVING.read_text())))
