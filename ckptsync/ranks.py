"""Collectives of a publish: the same order on every rank, one error for all, deadlines.

Everything goes over a gloo group of our own, also in an NCCL job: a rank that waits for storage must not sit
in an NCCL collective, whose watchdog kills the job after ten minutes, and Python objects do not belong on the
GPU.

Two channels carry a failure. The normal one is the next exchange: each begins with a consensus, so a rank
that failed says so there, every rank raises, and the group stays in step. The other is the alarm, a key in
the job's own key-value store, for ranks that are stuck in a collective that the failed rank will never join:
the main thread waits in Python and looks at the alarm, while a side thread blocks in C++.

torch is imported only where a process group exists.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from . import errors, logs
from .alarm import Alarm
from .digest import sha256
from .errors import Conflict, InvalidInput, RankError, RankFailed, RanksDisagree, RankTimeout, SchemaMismatch
from .exchange import Status, converse
from .lane import Lane

if TYPE_CHECKING:
    import torch.distributed as dist

log = logs.get(__name__)

T = TypeVar("T")

TICK = 0.5
"""How often a waiting rank looks at the alarm, in seconds. What it waits for wakes it at once."""

TELL_EVERY = 60.0
"""A rank that waits says so in the log this often, in seconds."""

_groups = 0


class Ranks:
    """This process among the ranks of the job: the default process group if there is one, else just itself.

    Every method but `close` is collective: all ranks call the same ones in the same order. `timeout`
    (seconds) bounds each wait; a dead rank is noticed at once, so it only has to be longer than the slowest
    write of one shard.
    """

    def __init__(self, *, timeout: float = 1800.0) -> None:
        self.rank, self.world_size = _place()
        self._process = os.getpid()
        self._timeout = timeout
        self._settled: BaseException | None = None
        self._lost = ""
        if self.world_size > 1:
            self._group = _gloo_group(timeout)
            self._alarm = Alarm(f"ckptsync/{_groups}", self.rank, self.world_size)
            self._talk, self._work = Lane("ckptsync-talk"), Lane("ckptsync-work")

    @property
    def group(self) -> dist.ProcessGroup:
        """The gloo group, for messages inside `run`. Only where there is more than one rank."""
        return self._group

    @property
    def is_writer(self) -> bool:
        """Whether this rank decides, and commits. One does: a file system is never a barrier."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self._exchange(value, None, "a broadcast from rank 0", from_zero=True)[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank. For small values."""
        return self._exchange(value, None, "a gather")

    def agree(self, error: BaseException | None = None) -> None:
        """Raise on every rank if any rank brings an error; else return on every rank once all have come.

        RankFailed with the first failing rank's number and message; a decision against the caller
        (InvalidInput, Conflict, SchemaMismatch) keeps its type on every rank. On the failing rank the error is the
        cause. A KeyboardInterrupt is raised as such where it came up. `agree(error)` meets whatever exchange the
        other ranks are in.
        """
        self._exchange(None, error, "the consensus of all ranks", agree_only=True)

    def same(self, value: Sequence[str], what: str) -> None:
        """RanksDisagree on every rank, with the first difference, unless all bring the same lines."""
        if len(set(self.gather(sha256("\n".join(value).encode("utf-8", "surrogatepass"))))) == 1:
            return
        differences = self.gather(_first_difference(self.broadcast(list(value)), value))
        rank, (at, zero, other) = next((r, found) for r, found in enumerate(differences) if found is not None)
        self._settle(RanksDisagree(f"ranks disagree on {what}: at {at}, rank 0 has {zero}, rank {rank} has {other}"))

    def run(self, work: Callable[[], T], what: str) -> T:
        """`work()`, which may block in collectives of the job, without being stuck there when a rank fails.

        Raises what `work` raises; RankFailed if another rank failed meanwhile (its part may then hang on in a
        side thread: the job's own process group is out of step); RankTimeout if a rank died or never came.
        """
        if self.world_size == 1:
            return work()
        self._check_lost()
        if self._work.busy:
            self._work = Lane("ckptsync-work")
        return self._wait(self._work.submit(work), what, heed_failed=True)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A section that all ranks leave together: normally, or all with an error. Not to be nested."""
        self._check_place()
        try:
            try:
                yield
            except BaseException as error:
                if error is not self._settled and not self._lost:
                    self.agree(error)
                raise
            self.agree()
        finally:
            self._settled = None  # its traceback holds tensors

    def close(self) -> None:
        """Give the group back. One that lost a rank is left alone: taking it down would wait for the rank."""
        if self.world_size == 1 or self._lost or self._talk.closed:
            return
        self._talk.close()
        self._work.close()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    # -- inside ----------------------------------------------------------------------------------------------

    def _exchange(
        self,
        value: Any,
        error: BaseException | None,
        what: str,
        *,
        from_zero: bool = False,
        agree_only: bool = False,
    ) -> list[Any]:
        if self.world_size == 1:
            if error is not None:
                self._settle(error)
            return [value]
        self._check_lost()
        status = None if error is None else (type(error).__name__, self._words(error))
        if status is not None:
            with self._store_answers():
                self._alarm.ring("failed", status[1])
        job = self._talk.submit(
            lambda: converse(self._group, status, value, from_zero=from_zero, agree_only=agree_only)
        )
        try:
            failures, values = self._wait(job, what)
        except RankTimeout as timeout:
            raise timeout from error
        if failures is None:
            return values
        self._alarm.next_round()
        return self._settle(_common(failures), error)

    def _words(self, error: BaseException) -> str:
        if isinstance(error, RankFailed):  # told by a rank already, be it over another group
            return str(error)
        kind = "" if isinstance(error, errors.CkptSyncError) else f"{type(error).__name__}: "
        return f"rank {self.rank}: {kind}{str(error) or 'no message'}"

    def _settle(self, error: BaseException, cause: BaseException | None = None) -> NoReturn:
        """Raise what all ranks know of already, so that nobody tells it again."""
        if cause is not None and not isinstance(cause, Exception):
            error = cause
        self._settled = error
        raise error from (cause if cause is not error else error.__cause__)

    def _wait(self, job: concurrent.futures.Future[T], what: str, *, heed_failed: bool = False) -> T:
        start = told = time.monotonic()
        while not concurrent.futures.wait([job], timeout=TICK).done:
            self._look_at_alarm(heed_failed)
            now = time.monotonic()
            if now - start > self._timeout:
                self._lose(f"rank {self.rank} waited {self._timeout:g} s for {what}")
            if now - told > TELL_EVERY:
                told = now
                log.info(
                    "rank %d has waited %.0f s for %s", self.rank, now - start, what, extra={"event": "ranks-waiting"}
                )
        failed = job.exception()
        if failed is not None and not heed_failed:
            self._lose(f"rank {self.rank} lost the connection in {what} ({_first_line(failed)})")
        return job.result()

    def _look_at_alarm(self, heed_failed: bool) -> None:
        with self._store_answers():
            lost = self._alarm.look("lost")
            failed = self._alarm.look("failed") if heed_failed else ""
        if lost:
            self._lose(lost)
        if failed:
            raise _Released(failed)

    def _lose(self, message: str) -> NoReturn:
        """A rank is dead or away for good: tell the others, find out which, and raise RankTimeout."""
        self._lost = message
        with self._store_answers():
            self._alarm.ring("lost", message)
            absent = ", ".join(map(str, self._alarm.absent_ranks()))
            who = f"; no sign of life from rank {absent}" if absent else ""
            self._lost = f"{self._alarm.look('lost')}{who}"
        raise RankTimeout(f"{self._lost}. Restart the job to publish again")

    @contextmanager
    def _store_answers(self) -> Iterator[None]:
        """RankTimeout if the job's key-value store is gone; it lives with rank 0 or with the launcher."""
        try:
            yield
        except RuntimeError as error:
            gone = f"the job's key-value store is gone, with rank 0 or the launcher ({_first_line(error)})"
            self._lost = f"{self._lost}; {gone}" if self._lost else gone
            raise RankTimeout(f"{self._lost}. Restart the job to publish again") from error

    def _check_place(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInput(
                f"this process was forked from {self._process}, which made the publisher and goes on with its epoch "
                "and its numbers: make a Publisher of its own here, after the fork"
            )
        if _place() != (self.rank, self.world_size):
            raise InvalidInput(
                "the process group was made or taken down after the publisher: make the publisher after "
                "init_process_group, on every rank"
            )

    def _check_lost(self) -> None:
        if self._lost:
            raise RankTimeout(f"this job lost a rank before: {self._lost}. Restart the job to publish again")


class _Released(RankFailed):
    """Another rank's failure, seen while stuck in a collective; carries that rank's words unchanged."""


def _common(failures: list[Status]) -> RankError | InvalidInput | Conflict | SchemaMismatch:
    """The one error that every rank raises: the first failing rank's."""
    told = [failure for failure in failures if failure is not None]
    name, words = next((failure for failure in told if failure[0] != _Released.__name__), told[0])
    kind = getattr(errors, name, RankFailed)
    if isinstance(kind, type) and issubclass(kind, InvalidInput | Conflict | RanksDisagree | SchemaMismatch):
        return kind(words)
    return RankFailed(words)


def _first_difference(zero: Sequence[str], mine: Sequence[str]) -> tuple[int, str, str] | None:
    for at, (here, there) in enumerate(zip_longest(zero, mine, fillvalue="nothing")):
        if here != there:
            return at, here, there
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _place() -> tuple[int, int]:
    # Not imported means not initialized: the core stays free of torch.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _gloo_group(timeout: float) -> dist.ProcessGroup:
    from datetime import timedelta

    import torch.distributed as dist

    global _groups
    _groups += 1  # the same on every rank, since making a group is collective
    # Gloo's own deadline only ends the side thread; the main thread has its own, and says who was missing.
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout + 60))
    if group is None:
        raise InvalidInput("this process is not a member of the default process group")
    return group
