"""The two drills, line by line as the documentation has them: exit codes, and what is printed but for numbers."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ckptsync.cli import main

HERE = Path(__file__).parents[2]

NUMBER = re.compile(r"(?<![\w.])-?(?!100\.000)\d[\d,]*(\.\d+)?(?!\w)")
DIGEST = re.compile(r"\b[0-9a-f]{12}\b")
AGE = re.compile(r"# (ms|s|min|h)\b")


class Line(NamedTuple):
    command: str
    code: int
    prints: list[str]


def lines(page: str) -> list[Line]:
    """Every `$ command` of the page's console blocks, with the lines below it."""
    found: list[Line] = []
    for block in re.findall(r"```console\n(.*?)```", (HERE / "docs" / page).read_text(), re.DOTALL):
        for text in block.splitlines():
            if text.startswith("$ "):
                command, _, code = text[2:].partition("  # exit code ")
                found.append(Line(command, int(code or 0), []))
            else:
                found[-1].prints.append(text)
    return found


def plain(text: str) -> str:
    return " ".join(AGE.sub("# s", NUMBER.sub("#", DIGEST.sub("<digest>", text))).split())


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """Runs one line in a folder that has `examples`: its exit code and what it prints.

    What is Python runs in this process, where torch is imported already; what kills itself, and the rest, in bash.
    """
    (tmp_path / "examples").symlink_to(HERE / "examples")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    environment = {"PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"

    def run(command: str) -> tuple[int, str]:
        words = shlex.split(command)
        if words[0] not in ("ckptsync", "python"):
            ran = subprocess.run(
                ["bash", "-c", command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=200
            )
            return ran.returncode, ran.stdout + ran.stderr * (ran.returncode > 1)
        monkeypatch.setattr(sys, "argv", words if words[0] == "ckptsync" else words[1:])
        capsys.readouterr()
        code = 0
        try:
            main() if words[0] == "ckptsync" else runpy.run_path(words[1], run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        return code, capsys.readouterr().out

    yield run
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", ["recovery.md", "debugging.md"])
def test_a_drill_goes_as_its_page_says(shell, page):
    for line in lines(page):
        code, output = shell(line.command)
        assert code == line.code, f"$ {line.command}\n{output}"
        printed = iter([plain(each) for each in output.splitlines()])
        for expected in line.prints:
            assert plain(expected) in printed, f"$ {line.command}\nlacks {expected!r} in its place:\n{output}"
