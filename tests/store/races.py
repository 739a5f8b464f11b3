"""Two processes that create the same names in one store at the same moments."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

from ckptsync.errors import AlreadyExists
from ckptsync.store import open_store


def won_by_two(url: str, options: Mapping[str, Any], rounds: int) -> int:
    """How often one of them was told that it had created the name, over all names."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (url, options, rounds, barrier, results)
    processes = [context.Process(target=_create_each, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    won = sum(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return won


def _create_each(url: str, options: Mapping[str, Any], rounds: int, barrier: Any, results: Any) -> None:
    store, won = open_store(url, options=dict(options)), 0
    for number in range(rounds):
        barrier.wait(60)
        try:
            store.create(f"epochs/e{number}", f"{os.getpid()}".encode())
            won += 1
        except AlreadyExists:
            pass
    results.put(won)
