"""Runs a function on N real gloo processes and brings back what each returned or raised.

    outcomes = run_ranks(4, job, "an argument")     # job(rank, "an argument") runs in every process
    assert [outcome.value for outcome in outcomes] == [...]

Processes start clean, so a job is a function at the top of a module and its arguments are plain data. Rank 0
hosts the key-value store, on a port the system picks. Nobody outlives the deadline.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any


@dataclass(frozen=True)
class Caught:
    """An error as text: its type's name, its words, its cause's type name, and when it came (time.time)."""

    kind: str
    message: str
    cause: str
    at: float
    trace: str


@dataclass(frozen=True)
class Outcome:
    rank: int
    value: Any = None
    error: Caught | None = None
    killed: bool = False
    """The process died without a word."""

    hung: bool = False
    """It was still running at the deadline, and was killed."""


def caught(error: BaseException) -> Caught:
    trace = "".join(traceback.format_exception(error))
    cause = type(error.__cause__).__name__ if error.__cause__ else ""
    return Caught(type(error).__name__, str(error), cause, time.time(), trace)


@contextmanager
def catching(into: dict[str, Caught], name: str) -> Iterator[None]:
    """Files whatever is raised in the block under `name`."""
    try:
        yield
    except BaseException as error:
        into[name] = caught(error)


def clean_processes() -> Any:
    """Processes as clean as spawned ones: forked from a server that has imported torch and done nothing else.

    Importing torch takes four ranks on two cores ten seconds, each time; and what the first DTensor imports, two more.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "ckptsync.publish"]
    )
    return context


def run_ranks(
    count: int,
    job: Callable[..., Any],
    *args: Any,
    deadline: float = 180.0,
    collective_timeout: float = 600.0,
    cuda: bool = False,
) -> list[Outcome]:
    """Run `job(rank, *args)` on `count` ranks; a job that raises is an Outcome with its error.

    `collective_timeout` is that of the job's default process group, in seconds. With `cuda` each rank has its own
    GPU, and the default group is NCCL's.
    """
    context = clean_processes()
    ports, finished = context.SimpleQueue(), context.Event()
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(
            target=_main,
            args=(rank, count, collective_timeout, cuda, ports, finished, pipe[1], job, args),
            daemon=True,
        )
        for rank, pipe in enumerate(pipes)
    ]
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        return _collect([receiver for receiver, _ in pipes], time.monotonic() + deadline)
    finally:
        finished.set()
        for process in processes:
            process.join(2.0)
            process.kill()
            process.join()


def returned(outcomes: list[Outcome]) -> list[Any]:
    """The values of ranks that all returned; else shows what went wrong where."""
    bad = [
        f"rank {o.rank}: {o.error.trace if o.error else 'killed' if o.killed else 'hung'}"
        for o in outcomes
        if o.error or o.killed or o.hung
    ]
    assert not bad, "\n".join(bad)
    return [outcome.value for outcome in outcomes]


def _collect(receivers: list[Connection], deadline: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(receivers):
        waiting = {receivers[rank]: rank for rank in range(len(receivers)) if rank not in outcomes}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for receiver in ready:
            rank = waiting[receiver]  # type: ignore[index]
            try:
                outcomes[rank] = receivers[rank].recv()
            except (EOFError, ConnectionError):
                outcomes[rank] = Outcome(rank, killed=True)
        if not ready:
            outcomes |= {rank: Outcome(rank, hung=True) for rank in waiting.values()}
    return [outcomes[rank] for rank in range(len(receivers))]


def _main(
    rank: int,
    count: int,
    collective_timeout: float,
    cuda: bool,
    ports: Any,
    finished: Any,
    sender: Connection,
    job: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    join_job(rank, count, ports, collective_timeout, cuda)
    try:
        outcome = Outcome(rank, value=job(rank, *args))
    except BaseException as error:
        outcome = Outcome(rank, error=caught(error))
    sender.send(outcome)
    finished.wait(60)  # rank 0 hosts the store: it must not leave first


def join_job(rank: int, count: int, ports: Any, collective_timeout: float = 600.0, cuda: bool = False) -> None:
    """Make this process a rank of a job. `ports`: a queue that is the job's own, for where rank 0 is."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore(
        "127.0.0.1",
        0 if rank == 0 else ports.get(),
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    if rank == 0:
        for _ in range(count - 1):
            ports.put(store.port)
    limit = timedelta(seconds=collective_timeout)
    if cuda:
        torch.cuda.set_device(rank)
    backend = "cuda:nccl,cpu:gloo" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
