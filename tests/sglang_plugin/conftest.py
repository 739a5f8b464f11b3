"""A real SGLang 0.5.23 (CPU) with the plugin, tensor parallel over two ranks, and three versions of a tiny Qwen3."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engines import conftest as servers
from tests.live.versions import broken, folders, staged, versions
from tests.vllm_plugin import overlay

__all__ = ["broken", "folders", "staged", "versions"]


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return overlay.python_path(str(tmp_path_factory.mktemp("entry-points")), "sglang")


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder: what is in it goes wrong in a rank. See `overlay.FAULTS`."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(plugin_path: str, folders: dict[str, str], faults: Any, tmp_path_factory: Any) -> Iterator[servers.Server]:
    """Two ranks, started on `a` without a flag of ours. Tests leave it serving, whatever version it holds.
    Of one module: what the environment says then is not for others."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PYTHONPATH", plugin_path)
        patch.setenv("CKPTSYNC_TEST_FAULTS", str(faults))
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        stack.callback(remove_queues)
        start = servers._starter(tmp_path_factory.mktemp("sglang"), stack)
        yield start("sglang", folders["a"], "--tp", "2", *servers.ROOM["sglang"])


def remove_queues() -> None:
    """What ranks leave in shared memory when they are ended by a signal: 25 MB, named after their process."""
    for path in glob.glob("/dev/shm/sgl_shm_mq_*"):
        if not os.path.exists(f"/proc/{path.split('_')[3]}"):
            os.unlink(path)


pytest_runtest_makereport = servers.pytest_runtest_makereport
