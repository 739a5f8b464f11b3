"""One watcher for each engine, as far as this host can see: a lock for each engine's URL, in the folder of the stage
and in one that all watchers of this user share, whichever stage they have. (An engine can be loaded from a stage by
watchers of its own user alone: staged files are private.) A name that is no URL, as of an engine in a Ray actor, is
somebody else's in another job: it is claimed in the stage alone.

Labels alone do not tell two channels apart, as both may have an `e1-v1`. Watchers on other hosts are noticed by what
they do to the label (see `serving`).
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ckptsync.errors import EngineRefused

from . import locks
from .fetch import local_errors, private_folder

LOOPBACK = re.compile(r"(?<=://)(localhost|127(\.\d+){3}|\[::1\]|0\.0\.0\.0)(?=[:/]|$)")


@contextmanager
def claimed(stage: str, url: str, who: str) -> Iterator[None]:
    """Hold the engine's claim; `who` is what another watcher is told. EngineRefused if another one holds it,
    StoreError if the folder of the stage, or of temporary files, cannot be used.

    The kernel lets go of it when the process dies.
    """
    with ExitStack() as held:
        with local_errors(stage):
            everybodys = os.path.join(tempfile.gettempdir(), f"ckptsync-engines-{os.geteuid()}")
            for folder in (stage, private_folder(everybodys)) if "://" in url else (stage,):
                held.enter_context(_locked(folder, url, who))
        yield


@contextmanager
def _locked(folder: str, url: str, who: str) -> Iterator[None]:
    path = os.path.join(folder, f".engine-{_key(url)}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    handle = locks.acquire(path, exclusive=True, wait=False)
    if handle is None:
        raise EngineRefused(f"{url} is followed by another watcher on this host ({_said(path)}): stop that one first")
    try:
        with suppress(OSError):  # a full disk: the lock holds all the same, and does not say whose it is
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()}, {who}".encode())
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)  # while it is held: whoever opened it before looks again
        os.close(handle)


def _key(url: str) -> str:
    """One for all names of this host. A pod has a loopback address of its own, and may share the stage with other pods:
    there the network's namespace is a part of the name."""
    name = LOOPBACK.sub(lambda _: _namespace(), url.rstrip("/").lower())
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _namespace() -> str:
    with suppress(FileNotFoundError):
        return os.readlink("/proc/self/ns/net")
    return "this host"


def _said(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return "which ends just now"
