"""Random lives whose every attempt has three real gloo ranks, which fail, disagree and die: `RankedLifecycle`.

Law 7, looked at after each thing that they do: every rank comes to an end within seconds, and all to the same one. What
they were told, that is the same report or the same error in the same words; and where one was killed, all others say
that it is lost. Ranks other than 0 have a store that fails whatever they ask of it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from ckptsync import errors
from ckptsync.errors import CkptSyncError, RankFailed, RanksDisagree, RankTimeout, StoreFull
from ckptsync.store import open_store
from ckptsync.store.base import Store
from ckptsync.testing.hooks import CHANGES, Crashing, Failing, HookedStore
from ckptsync.testing.lifecycle import Lifecycle
from ckptsync.testing.mortal import Killed, Life, Timeless, Trainer, Weights
from ckptsync.version import VersionId
from tests.trainer.ranks_harness import clean_processes, join_job

RANKS = 3
OTHERS_LOOK = "law 7: only rank 0 may look at the store"
ANY_RANK = st.integers(0, RANKS - 1)

SECONDS = 60.0
"""What "within seconds" may mean on a busy machine. The publishers' own deadline is half an hour."""

Tensors = Iterator[tuple[str, torch.Tensor]]
Fault = Callable[[int, Tensors], Tensors]
"""What becomes of a rank's tensors. Picklable."""

Bug = Callable[[], None]
"""Plants itself in the process that it is called in. Picklable."""


class Report(NamedTuple):
    """What a publish told a rank."""

    version: VersionId
    content_digest: str
    changed: bool
    nbytes: int


def nothing() -> None: ...


class Told(NamedTuple):
    """What a rank came to: a value, or an error by type and words."""

    value: Any
    error: str = ""
    words: str = ""


# -- on a rank -----------------------------------------------------------------------------------------------------


def be_rank(rank: int, orders: Connection, ports: Any, bug: Bug, root: str, *start: Any) -> None:
    join_job(rank, RANKS, ports)
    bug()
    member = Member(rank, root, *start)
    while True:
        order, args = orders.recv()
        orders.send(_told(partial(getattr(member, order), *args)))


def _told(act: Callable[[], Any]) -> Told:
    try:
        return Told(act())
    except Exception as error:
        return Told(None, type(error).__name__, str(error))


class Member:
    """One rank of an attempt."""

    def __init__(self, rank: int, root: str, base: VersionId | None, deltas: bool) -> None:
        self._rank, self._hook = rank, Hook()
        store = HookedStore(Timeless(open_store(root)), self._hook)
        self._trainer = Trainer(store if rank == 0 else unreachable(root), base, {}, deltas)

    def start(self, dies: int | None) -> int:
        self._hook.now = Crashing(dies)
        self._trainer.start()
        return self._trainer.publisher.epoch

    def publish(
        self, dies: int | None, full: int | None, weights: Weights, fault: Fault | None, how: dict[str, Any]
    ) -> Report:
        """`dies`, `full`: the change to the store before which rank 0 is killed, or finds no space, if any."""
        self._hook.now = Crashing(dies) if full is None else no_space(full)
        model = sharded(weights) if fault is None else fault(self._rank, iter(weights.items()))
        done = self._trainer.publisher.publish(model, **how)
        return Report(done.version, done.content_digest, done.changed, done.nbytes)


@dataclass
class Hook:
    now: Callable[[str, str], None] = lambda *_: None

    def __call__(self, operation: str, path: str) -> None:
        self.now(operation, path)


def no_space(at: int) -> Failing:
    changes = iter(range(1 << 30))
    return Failing(
        partial(StoreFull, "no space left"), lambda operation, _: operation in CHANGES and next(changes) >= at, times=1
    )


def unreachable(root: str) -> HookedStore:
    never = Failing(partial(AssertionError, OTHERS_LOOK), lambda *_: True)
    return HookedStore(open_store(root), never)


def sharded(weights: Weights) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in weights.items()}


def breaks(bad: int, at: int, rank: int, tensors: Tensors) -> Tensors:
    for number, each in enumerate(tensors):
        if rank == bad and number == at:
            raise RuntimeError("the loader broke")
        yield each


def is_killed(bad: int, at: int, rank: int, tensors: Tensors) -> Tensors:
    for number, each in enumerate(tensors):
        if rank == bad and number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield each


def differs(bad: int, at: int, rank: int, tensors: Tensors) -> Tensors:
    for number, (name, tensor) in enumerate(tensors):
        yield (f"{name}.other" if rank == bad and number == at else name), tensor


# -- beside the ranks ----------------------------------------------------------------------------------------------


class RankedTrainer(Trainer):
    """Looks to a `Lifecycle` as one rank does: what one is told, all are, and what they come to has to be one thing.

    `life.left`: rank 0 is killed before this change, by SIGKILL. Raises Killed once a rank is dead and the others have
    said so.
    """

    def __init__(self, root: str, base: VersionId | None, weights: Weights, deltas: bool, bug: Bug) -> None:
        self.life, self.weights = Life(), weights
        context = clean_processes()
        pipes = [context.Pipe() for _ in range(RANKS)]
        self._pipes, self._ports = [mine for mine, _ in pipes], context.SimpleQueue()
        self._ranks = [
            context.Process(target=be_rank, args=(rank, theirs, self._ports, bug, root, base, deltas), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for rank, (_, theirs) in zip(self._ranks, pipes, strict=True):
            rank.start()
            theirs.close()

    @property
    def publisher(self) -> RankedTrainer:  # type: ignore[override]
        return self

    def start(self) -> None:
        self.epoch = self._all("start", self.life.left)

    def publish(self, weights: Weights, *, fault: Fault | None = None, full: int | None = None, **how: Any) -> Report:
        return self._all("publish", self.life.left, full, weights, fault, how)  # type: ignore[no-any-return]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()

    def _all(self, order: str, *args: Any) -> Any:
        for pipe in self._pipes:
            pipe.send((order, args))
        deadline = time.monotonic() + SECONDS
        told = [self._told(pipe, rank, deadline) for rank, pipe in enumerate(self._pipes)]
        living = [each for each in told if each is not None]
        if len(living) < len(told):
            self.close()
            ends = {rank.exitcode for rank in self._ranks}
            assert ends == {-signal.SIGKILL}, f"a rank ended by itself: {ends}"
            assert {each.error for each in living} <= {RankTimeout.__name__}, (
                f"law 7: a rank died, and others say {told}"
            )
            raise Killed
        assert len(set(map(repr, told))) == 1, f"law 7: ranks came to different ends: {told}"
        assert OTHERS_LOOK not in living[0].words, living[0].words
        if living[0].error:
            raise error_of(living[0])
        return living[0].value

    def _told(self, pipe: Connection, rank: int, deadline: float) -> Told | None:
        """None if it died."""
        assert pipe.poll(max(0.0, deadline - time.monotonic())), f"law 7: rank {rank} goes on for {SECONDS:g} s"
        try:
            return pipe.recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            return None


def error_of(told: Told) -> Exception:
    kind = getattr(errors, told.error, None)
    return kind(told.words) if kind is not None else AssertionError(f"{told.error}: {told.words}")


class RankedLifecycle(Lifecycle):
    """On a folder. `folder` makes an empty one; `bug` is planted in every rank."""

    folder: Callable[[], str]
    bug: Bug = staticmethod(nothing)

    def fresh_store(self) -> Store:
        self.root, self.attempts = self.folder(), list[RankedTrainer]()
        return open_store(self.root)

    def attempt(self, base: VersionId | None, weights: Weights, deltas: bool) -> RankedTrainer:
        self.attempts.append(RankedTrainer(self.root, base, weights, deltas, self.bug))
        return self.attempts[-1]

    @precondition(lambda self: self.trainer)
    @rule(rank=ANY_RANK, at=st.integers(0, 2))
    def a_rank_fails(self, rank: int, at: int) -> None:
        """All are told in its words, nothing is published, and the next publish works."""
        error = self._fails(RankFailed, fault=partial(breaks, rank, at))
        assert str(error) == f"rank {rank}: RuntimeError: the loader broke", f"law 7: {error}"

    @precondition(lambda self: self.trainer)
    @rule(rank=ANY_RANK, at=st.integers(0, 2))
    def a_rank_disagrees(self, rank: int, at: int) -> None:
        self._fails(RanksDisagree, fault=partial(differs, rank, at))

    @precondition(lambda self: self.trainer)
    @rule(at=st.integers(0, 3))
    def the_store_is_full(self, at: int) -> None:
        """For rank 0, which alone looks at it. A version of changed weights takes four changes at least."""
        self.steps += 1
        self.trainer.train(self.steps)
        error = self._fails(RankFailed, full=at)
        assert str(error) == "rank 0: no space left", f"law 7: {error}"

    @precondition(lambda self: self.trainer)
    @rule(rank=ANY_RANK, at=st.integers(0, 2))
    def a_rank_dies(self, rank: int, at: int) -> None:
        before = self.committed()
        with suppress(Killed):
            done = self.trainer.publish(self.trainer.weights, fault=partial(is_killed, rank, at))
            raise AssertionError(f"law 7: {done} was published though rank {rank} died")
        assert self.committed() == before, "law 7: a publish that lost a rank made a version"
        self.trainer = None

    def _fails(self, kind: type[CkptSyncError], **how: Any) -> CkptSyncError:
        before = self.committed()
        try:
            done = self.trainer.publish(self.trainer.weights, **how)
        except kind as error:
            assert self.committed() == before, "law 7: a publish that failed made a version"
            return error
        raise AssertionError(f"law 7: {done} was published though a rank failed")

    def teardown(self) -> None:
        super().teardown()
        for attempt in self.attempts:
            attempt.close()
