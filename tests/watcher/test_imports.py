"""A sidecar is small: the core imports neither torch nor an engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "safetensors", "vllm", "sglang", "ray", "httpx", "fsspec",
"s3fs", "watchdog",
         "starlette", "uvicorn", "rich", "typer")  # fmt: skip

CORE = (
    "ckptsync.channel, watchers.watcher",
    "watchers.stage",
    "watchers.proof",
    "watchers.engines.embedded",
    "watchers.sidecar",
    "watchers.fleet",
    "ckptsync.dashboard.server",
    "ckptsync.metrics",
)


@pytest.mark.parametrize("modules", CORE)
def test_the_core_imports_nothing_heavy(modules: str) -> None:
    code = f"import sys\nimport {modules}\nprint(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_core_works_where_torch_cannot_be_imported() -> None:
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
    code = blocked + "import ckptsync.channel, watchers.watcher"
    subprocess.run([sys.executable, "-c", code], check=True)
