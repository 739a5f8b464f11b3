"""Is there room? Asked before the first byte: free space of a local store, host memory of every rank's host."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import defaultdict

from .errors import InvalidInput, StoreFull
from .ranks import Ranks
from .store.base import Store
from .wording import counted, exact_bytes, human_bytes

CGROUP = "/sys/fs/cgroup"

MARGIN = 64 << 20
"""Beside tensors: what the store's writers buffer, headers, the manifest."""


def check_space(store: Store, nbytes: int) -> None:
    """StoreFull, with the numbers, if a local store has no room for a version of `nbytes` of tensors, and for MARGIN.
    Others cannot be asked. Nothing is written, so this may come before an epoch is claimed for the version."""
    free = free_bytes(store)
    if free is not None and free < nbytes + MARGIN:
        raise StoreFull(
            f"{store.url}: the version has {exact_bytes(nbytes)}, {human_bytes(MARGIN)} are kept for what is written "
            f"beside tensors, and {exact_bytes(free)} are free: delete old versions"
        )


def free_bytes(store: Store) -> int | None:
    """Bytes that this user may still write; None for a store that is not a folder.

    A user quota does not show here: it comes as StoreFull of the write, named as quota.
    """
    if not os.path.isabs(store.url):
        return None
    folder = store.url
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def check_memory(ranks: Ranks, nbytes: int) -> None:
    """Collective. InvalidInput, with the numbers, if the ranks of a host need more memory than it has left.

    `nbytes` is what this rank needs at its peak, beyond what it holds now.
    """
    hosts: dict[str, list[tuple[int, int | None]]] = defaultdict(list)
    for host, need, available in ranks.gather((socket.gethostname(), nbytes, available_memory())):
        hosts[host].append((need, available))
    for host, needs in hosts.items():
        known = [available for _, available in needs if available is not None]
        total = sum(need for need, _ in needs)
        if known and total > min(known):
            raise InvalidInput(
                f"host {host}: publishing needs {exact_bytes(total)} of host memory on {counted(len(needs), 'rank')}, "
                f"and {exact_bytes(min(known))} are available: publish in the foreground, or lower bucket_bytes or "
                "shard_bytes"
            )


def available_memory() -> int | None:
    """Bytes of host memory that this process may still take: the host's, or what its cgroup leaves."""
    found = [value for value in (_host_memory(), _cgroup_memory()) if value is not None]
    return min(found, default=None)


def _host_memory() -> int | None:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _cgroup_memory() -> int | None:
    # Version 2, as containers see their own group. "max" means no limit; page cache counts as used but is given back.
    with contextlib.suppress(OSError, ValueError):
        limit = int(_read("memory.max"))
        stat = dict(line.split() for line in _read("memory.stat").splitlines())
        return limit - int(_read("memory.current")) + int(stat.get("inactive_file", 0))
    return None


def _read(name: str) -> str:
    with open(os.path.join(CGROUP, name)) as file:
        return file.read()
