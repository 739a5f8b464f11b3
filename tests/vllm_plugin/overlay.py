"""What `pip install ckptsync` would add to the engine's environment, as folders for PYTHONPATH: the working
tree, the few dependencies that the engine does not bring, and pyproject's own entry points."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "envs"))

import make

REPO = os.path.abspath(os.path.join(make.HERE, os.pardir, os.pardir))
MISSING = {
    "vllm": ("tenacity>=8.3", "watchdog>=4.0", "xxhash>=3.4"),
    "sglang": ("blake3>=1.0", "tenacity>=8.3", "watchdog>=4.0"),
}


def python_path(folder: str, engine: str = "vllm") -> str:
    """The PYTHONPATH of an engine with the plugin; `folder` is for this run's entry points."""
    write_entry_points(folder)
    return os.pathsep.join([REPO, folder, dependencies(engine)])


def dependencies(engine: str) -> str:
    """Installed once, beside the engine's environment, which stays stock."""
    digest = hashlib.sha256(repr((make.env_dir(engine), MISSING[engine])).encode()).hexdigest()
    target = os.path.join(make.cache_dir(), "envs", f"{engine}-plugin-{digest[:12]}")
    with make.locked(target + ".lock"):
        if not os.path.isdir(target):
            pip = [make.ensure(engine), "-m", "pip", "install", "--quiet", "--no-deps", "--target", target + ".partial"]
            subprocess.run([*pip, *MISSING[engine]], check=True, stdout=sys.stderr)
            os.rename(target + ".partial", target)
    return target


UNPACKED = """
import os

def register():
    if os.environ.get("CKPTSYNC_TEST_UNPACKED"):
        import vllm._custom_ops as ops

        ops._supports_onednn = False
"""


FOR_TESTS = {
    # Without oneDNN, layers compute from their parameters.
    "vllm.general_plugins": {
        "unpacked": "ckptsync_test_unpacked:register",
        "faults": "tests.vllm_plugin.faults:register",
    },
    "sglang.srt.plugins": {"faults": "tests.sglang_plugin.faults:register"},
}
"""Plugins that do nothing until an environment variable asks for it."""


def write_entry_points(folder: str) -> None:
    with open(os.path.join(REPO, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    info = os.path.join(folder, f"ckptsync-{project['version']}.dist-info")
    os.makedirs(info)
    with open(os.path.join(folder, "ckptsync_test_unpacked.py"), "w", encoding="utf-8") as file:
        file.write(UNPACKED)
    with open(os.path.join(info, "METADATA"), "w", encoding="utf-8") as file:
        file.write(f"Metadata-Version: 2.1\nName: ckptsync\nVersion: {project['version']}\n")
    with open(os.path.join(info, "entry_points.txt"), "w", encoding="utf-8") as file:
        for group, entries in project["entry-points"].items():
            entries |= FOR_TESTS.get(group, {})
            file.write("\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), "", ""]))
