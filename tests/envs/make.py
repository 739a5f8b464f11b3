"""Build, once, the environment a real engine server runs in, or what the benchmarks compare with.

    python tests/envs/make.py vllm|sglang|peers

The last line on stdout is the environment's python; progress goes to stderr. Needs nothing but Python 3.11
and pip.

vLLM and SGLang pin different packages than each other and than ckptsync, so each gets its own venv in the
user's cache folder, named after what it is made of: a second clone with the same recipe finds it there. It
is built in a sibling folder and renamed; the marker, written last, says what was installed. No marker: not
an environment.

Modules are compiled here, explicitly: where PYTHONDONTWRITEBYTECODE is set, vLLM 0.32 otherwise compiles
3300 files in every process, which costs 80 s a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

HERE = os.path.dirname(os.path.abspath(__file__))
SERVERS = ("vllm", "sglang")
NAMES = (*SERVERS, "peers")
MARKER = "ckptsync-env.json"
PYTHON = (3, 11)
RECIPE = "1"
"""Raise it when the steps below change in a way that makes an older environment wrong."""


def cache_dir() -> str:
    """Where everything that is built once per user lives."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "ckptsync")


def env_dir(name: str) -> str:
    """The folder of environment `name`: its recipe is part of its name, so a new recipe never meets an old
    folder."""
    recipe = json.dumps([RECIPE, PYTHON, sections(requirements(name))])
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    return os.path.join(cache_dir(), "envs", f"{name}-{digest[:12]}")


def requirements(name: str) -> str:
    if name not in NAMES:
        raise SystemExit(f"unknown environment {name!r}: choose one of {', '.join(NAMES)}")
    return os.path.join(HERE, f"{name}.txt")


def python_of(folder: str) -> str:
    return os.path.join(folder, "bin", "python")


def complete(folder: str) -> bool:
    """Marked, and the Python that it was made from is still there."""
    return os.path.exists(os.path.join(folder, MARKER)) and os.path.exists(python_of(folder))


def ensure(name: str) -> str:
    """The python of environment `name`, built first if it is not there. Safe to call from several
    processes."""
    folder = env_dir(name)
    if complete(folder):
        return python_of(folder)
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    with locked(folder + ".lock"):
        if not complete(folder):
            build(name, folder)
    return python_of(folder)


def build(name: str, folder: str) -> None:
    """Make the environment in a sibling folder, move it into place, mark it. Runs under the lock."""
    started = time.monotonic()
    partial = folder + ".partial"
    for leftover in (partial, folder):
        if os.path.lexists(leftover):
            shutil.rmtree(leftover)
    say(f"{name}: making {folder}")
    run([interpreter(), "-m", "venv", partial])
    for words, packages in sections(requirements(name)):
        pip(python_of(partial), words, packages)
    os.rename(partial, folder)  # only bin/python is ever used: unlike the scripts' first lines, it survives a move
    compile_all(folder)
    mark(name, folder, time.monotonic() - started)
    say(f"{name}: ready after {time.monotonic() - started:.0f} s")


def sections(path: str) -> list[tuple[list[str], list[str]]]:
    """The `#:` sections of a requirements file: (pip's words, the packages)."""
    found: list[tuple[list[str], list[str]]] = []
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    for line in lines:
        if line.startswith("#:"):
            found.append((line[2:].split(), []))
        elif line and not line.startswith("#"):
            found[-1][1].append(line)
    return found


def pip(python: str, words: list[str], packages: list[str]) -> None:
    command, *options = words
    options += ["--yes"] if command == "uninstall" else ["--no-compile", "--prefer-binary"]
    say(f"  pip {' '.join(words)}: {len(packages)} packages")
    run([python, "-m", "pip", command, "--quiet", *options, *packages])


def compile_all(folder: str) -> None:
    """Byte-compile what was installed. A package's own Python 2 leftovers may not compile; that is not an
    error."""
    say("  compiling")
    command = [python_of(folder), "-m", "compileall", "-q", "-j", "0", os.path.join(folder, "lib")]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def mark(name: str, folder: str, seconds: float) -> None:
    """Write, last and in one step, what the environment holds."""
    listed = subprocess.run(
        [python_of(folder), "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True
    )
    packages = {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}
    content = {"name": name, "recipe": RECIPE, "seconds": round(seconds), "packages": packages}
    path = os.path.join(folder, MARKER)
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def interpreter() -> str:
    """A Python 3.11: this one, or the one on PATH. The CPU build of torch that vLLM pins exists for no
    other."""
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        raise SystemExit("engine environments need Python 3.11: put a python3.11 on PATH")
    return found


def run(command: list[str]) -> None:
    """Run a step with its output on stderr: stdout carries the answer only."""
    result = subprocess.run(command, check=False, stdout=sys.stderr)
    if result.returncode:
        raise SystemExit(f"{' '.join(command[:4])} … failed with exit code {result.returncode}; see above")


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the file lock; a process that has to wait says so once."""
    with open(path, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting: another process is building {path.removesuffix('.lock')}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python tests/envs/make.py {'|'.join(NAMES)}")
    print(ensure(sys.argv[1]))
