"""One call to many actors: who answered, who failed and why, who is late."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from ckptsync.errors import CkptSyncError, InvalidInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers(Generic[T]):
    """What became of one call, by actor. Each actor is in exactly one of the three."""

    answered: Mapping[str, T] = field(default_factory=dict)
    failed: Mapping[str, Exception] = field(default_factory=dict)
    """What the method raised, as itself; or Ray's own error for an actor that is dead or cannot be reached."""

    late: Mapping[str, float] = field(default_factory=dict)
    """Actor -> its deadline in seconds. The call is cancelled: it will not begin, if it has not begun yet."""

    @property
    def complete(self) -> bool:
        return not self.failed and not self.late

    def all(self) -> Mapping[str, T]:
        """Every actor's answer; PartialFailure, which carries these Answers, unless all have answered."""
        if not self.complete:
            raise PartialFailure(self)
        return self.answered


class PartialFailure(CkptSyncError):
    """Not every actor answered. The message names each that did not, and why; `answers` has the rest."""

    def __init__(self, answers: Answers[Any]) -> None:
        super().__init__(answers)
        self.answers = answers

    def __str__(self) -> str:
        why = [f"{name}: {type(error).__name__}: {error}" for name, error in self.answers.failed.items()]
        why += [f"{name}: no answer within {seconds:g} s" for name, seconds in self.answers.late.items()]
        return f"{len(why)} of {len(why) + len(self.answers.answered)} actors did not answer: {'; '.join(why)}"


def ask(
    actors: Mapping[str, ActorHandle[Any]],
    method: str,
    *args: Any,
    deadline: float,
    deadlines: Mapping[str, float] | None = None,
    **kwargs: Any,
) -> Answers[Any]:
    """Call `method(*args, **kwargs)` on every actor at once. Seconds in `deadlines` count for single ones.

    Never raises for an actor: it is in the Answers. Returns when each has answered, failed or come to its deadline, so
    one that hangs keeps nobody else waiting. All actors get one copy of large arguments: pass `ray.put(x)`.
    """
    due = dict.fromkeys(actors, deadline) | dict(deadlines or {})
    if unknown := due.keys() - actors.keys():
        raise InvalidInput(f"deadlines: {', '.join(sorted(unknown))} is not among the actors")
    started = time.monotonic()
    asked = {name: getattr(actor, method).remote(*args, **kwargs) for name, actor in actors.items()}
    late = _await(asked, due, started)
    answered: dict[str, Any] = {}
    failed: dict[str, Exception] = {}
    for name in asked.keys() - late.keys():
        try:
            answered[name] = get(asked[name])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is that actor's answer
            failed[name] = error
    return Answers(answered=answered, failed=failed, late=late)


def get(ref: ObjectRef[T], timeout: float | None = None) -> T:
    """As `ray.get`, but what the method raised is raised as itself, with its own words and fields; Ray's report of the
    other process is the cause."""
    try:
        return ray.get(ref, timeout=timeout)
    except RayTaskError as error:
        raise _own(error) from error


def _own(error: Exception) -> Exception:
    while isinstance(error, RayTaskError):  # a method that raises what another actor raised
        error = error.cause
    return error


def _await(asked: Mapping[str, ObjectRef[Any]], due: Mapping[str, float], started: float) -> dict[str, float]:
    """Who is not there by its deadline."""
    late: dict[str, float] = {}
    waiting = dict(asked)
    for seconds in sorted(set(due.values())):
        if waiting:
            left = max(0.0, started + seconds - time.monotonic())
            _, absent = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=left)
            waiting = {name: ref for name, ref in waiting.items() if ref in absent}
        for name in [name for name in waiting if due[name] == seconds]:
            late[name] = seconds
            _cancel(waiting.pop(name))
    return late


def _cancel(ref: ObjectRef[Any]) -> None:
    try:
        ray.cancel(ref)
    except RayError:
        return  # its actor is gone, and the call with it
