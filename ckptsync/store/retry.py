"""Bounded retries of what is transient, with one warning, so that a dead server is noticed within seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tenacity

from .. import logs
from ..errors import StoreUnavailable
from .translate import translate

log = logs.get("ckptsync.store")

T = TypeVar("T")


def translated(action: str, call: Callable[[], T]) -> T:
    """`call()`, with the storage's error raised as one of ours; its cause is the storage's own."""
    try:
        return call()
    except Exception as error:
        ours = translate(error, action)
        if ours is None or ours is error:
            raise
        raise ours from error


def retrying(action: str, call: Callable[[], T], *, deadline: float) -> T:
    """`translated`, tried again while StoreUnavailable is raised and fewer than `deadline` seconds have
    passed.

    `call` must be repeatable. The last try may end after the deadline by as much as its own timeouts.
    """
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(StoreUnavailable),
        stop=tenacity.stop_after_delay(deadline),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=2.0),
        before_sleep=_warn_once,
        retry_error_callback=_give_up,
    )
    result: T = attempts(translated, action, call)
    return result


def _warn_once(state: tenacity.RetryCallState) -> None:
    if state.attempt_number == 1 and state.outcome is not None:
        log.warning("%s; trying again", state.outcome.exception(), extra={"event": "store-retry"})


def _give_up(state: tenacity.RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    raise StoreUnavailable(
        f"{error}; gave up after {state.attempt_number} tries in {state.seconds_since_start or 0:.1f} s"
    ) from (error.__cause__ if error else None)
