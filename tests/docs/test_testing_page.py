"""docs/testing.md: its blocks are files for pytest, and pass."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptsync.engine import Engine, Generates, ReadsBack, Scores
from ckptsync.store.base import Reader, Store, Writer
from ckptsync.sweep import Sweepable, Unfinished

HERE = Path(__file__).resolve().parents[2]
PAGE = (HERE / "docs" / "testing.md").read_text()


FORMS = (Store, Reader, Writer, Sweepable, Unfinished, Engine, ReadsBack, Scores, Generates)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_tables_have_every_method_that_somebody_has_to_write(form: type) -> None:
    methods = [name for name in vars(form) if not name.startswith("_")]
    assert methods
    for name in methods:
        assert re.search(rf"^\| (reader |writer )?`{name}\b", PAGE, re.MULTILINE), name


def test_a_failure_of_the_contract_shows_its_values(tmp_path: Any) -> None:
    (tmp_path / "test_forgetful.py").write_text(FORGETFUL)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "whole_folders"]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    assert "E       AssertionError: assert [] == [" in done.stdout, done.stdout


FORGETFUL = """
import pytest

from ckptsync.engine import Engine, Generates, ReadsBack, Scores
from ckptsync.store.base import Reader, Store, Writer
from ckptsync.sweep import Sweepable, Unfinished

from ckptsync.testing import MemoryStore
from ckptsync.testing.contract import StoreContract


class Forgetful(MemoryStore):
    def list(self, folder=""):
        return iter(())


class TestForgetful(StoreContract):
    @pytest.fixture
    def root(self):
        store = Forgetful()
        return lambda: store
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_block_is_a_test_that_passes(tmp_path: Any) -> None:
    blocks = re.findall(r'^```python title="(test_\w+\.py)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == PAGE.count("```python") == 7
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    # The contract's large files are asked for in tests/store.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "not sizes and not large and not 40",
    ]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"(\d+) passed", done.stdout), done.stdout
