"""Paths inside a store, and the names of writers' temporary files."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable

from ..errors import InvalidName

Only = Callable[[str], bool]
"""Whether a path is among those meant."""

_TEMPORARY = ".ckptsync-tmp."


def parts_of(path: str) -> tuple[str, ...]:
    """`a/b/c` in its parts. Raises InvalidName for what is absolute, empty, or leads outside."""
    parts = tuple(path.split("/"))
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise InvalidName(f"{path!r} is not a plain relative path")
    if any(is_temporary(part) for part in parts):
        raise InvalidName(f"{path!r}: names that begin with {_TEMPORARY} are those of files in the making")
    return parts


def anything(_: str) -> bool:
    """The `Only` that spares nothing."""
    return True


def temporary_name() -> str:
    """Unique to this call, so that no two writers share one, and telling whose it was."""
    host = socket.gethostname().replace("/", "_")[:64]
    return f"{_TEMPORARY}{host}.{os.getpid()}.{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    return name.startswith(_TEMPORARY)


def writer_is_alive(name: str) -> bool:
    """Whether the process that made this temporary name runs on this host; False if it is of another."""
    host, _, rest = name.removeprefix(_TEMPORARY).rpartition(".")[0].rpartition(".")
    return host == socket.gethostname().replace("/", "_")[:64] and rest.isdigit() and process_runs(int(rest))


def process_runs(pid: int) -> bool:
    """On this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, as another user
        return True
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Dead, and nobody has asked how it ended: it writes nothing any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return False  # no /proc here, or it is gone meanwhile
