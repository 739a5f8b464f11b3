"""A publish that goes on in a thread: its handle, and what happens to it when the process has to end.

Interpreter exit and SIGTERM (where nobody else handles it) give a pending version `exit_seconds` to finish: the
snapshot is taken, and most of it may be written. What is not complete by then is dropped: the writers stop, take
their files away, and no manifest names them. A process that is killed outright leaves files that no manifest
names, for the next epoch to sweep.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # its exit hook must be registered before ours, so that ours runs first
import contextlib
import contextvars
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from . import host, logs
from .errors import Busy, CkptSyncError, StoreUnavailable

if TYPE_CHECKING:
    from .published import Published

log = logs.get(__name__)

CLEANUP_SECONDS = 5.0
"""How long a dropped version has to take its files away."""


class Dropped(CkptSyncError):
    """The process had to end before the version was complete; nothing of it is published."""


class BackgroundPublish:
    """The handle of one background publish, on one rank."""

    def __init__(self, *, skipped: bool = False) -> None:
        self.skipped = skipped
        """Whether there was nothing published, since the version before was not complete yet (`pending="skip"`)."""

        self.seen = False
        """Whether `result` has raised the error here, so that the next publish need not."""

        self._future: concurrent.futures.Future[Published] = concurrent.futures.Future()
        self._thread: threading.Thread | None = None
        self._drop = threading.Event()
        self._fields = logs.current()
        if skipped:
            self._future.set_exception(Busy("skipped: the background publish before it was not complete"))

    def done(self) -> bool:
        """Whether the version is complete, or failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Published:
        """Wait for the version to be complete. TimeoutError after `timeout` seconds.

        Raises what `Publisher.publish` raises, Busy if it was skipped. Not collective.
        """
        try:
            return self._future.result(timeout)
        except BaseException:
            self.seen = self._future.done()
            raise

    # -- for the publisher -----------------------------------------------------------------------------------

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ended within `seconds`, its thread too.

        A thread that still lets go of tensors when the interpreter ends is torn down inside C++, which aborts.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    @property
    def error(self) -> BaseException | None:
        return self._future.exception() if self._future.done() else None

    def check(self) -> None:
        """For the writer, between two tensors: Dropped if the process has to end."""
        if self._drop.is_set():
            raise Dropped("dropped: the process ended before the version was complete")

    def checking(self, progress: Callable[[int], None]) -> Callable[[int], None]:
        """`progress` that checks first."""

        def moved(nbytes: int) -> None:
            self.check()
            progress(nbytes)

        return moved

    def start(self, work: Callable[[], Published]) -> None:
        # The same mapping there and here: a line about its end says which version it was.
        context, self._fields = contextvars.copy_context(), logs.current()
        thread = threading.Thread(target=context.run, args=(self._run, work), name="ckptsync-background", daemon=True)
        try:
            with host.threads():
                thread.start()
        except StoreUnavailable as error:
            # All the same: other ranks have begun, and wait for this one.
            log.warning("published in the foreground: %s", error, extra={"event": "no-thread"})
            self._run(work)
        else:
            self._thread = thread

    def _run(self, work: Callable[[], Published]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - belongs to `result` and to the next publish
            kind = getattr(error, "kind", type(error).__name__)
            more = {"event": "publish-failed", "kind": kind}
            log.error("a background publish failed; the next publish raises it: %s", error, extra=more)
            self._future.set_exception(error)

    def finish(self, seconds: float) -> None:
        """Give it `seconds` to complete, else drop it."""
        if self.wait(seconds):
            return
        more = {**self._fields, "event": "publish-dropped"}
        log.warning("a background publish was not complete after %g s and is dropped", seconds, extra=more)
        self._drop.set()
        self.wait(CLEANUP_SECONDS)


class Background:
    """At most one publish in the background, and its last chance at exit."""

    def __init__(self, exit_seconds: float) -> None:
        self.current: BackgroundPublish | None = None
        self._exit_seconds = exit_seconds
        _live.add(self)
        _register()

    def start(self, handle: BackgroundPublish, work: Callable[[], Published]) -> None:
        """Run `work` in a thread for `handle`, which is the current one from now on."""
        self.current = handle
        _handle_sigterm()
        handle.start(work)

    def finish(self, deadline: float) -> None:
        if self.current is not None:
            self.current.finish(max(0.0, deadline - time.monotonic()))

    @property
    def deadline(self) -> float:
        return time.monotonic() + self._exit_seconds


_live: weakref.WeakSet[Background] = weakref.WeakSet()
_registered = False


def _register() -> None:
    global _registered
    if not _registered:
        _registered = True
        # `atexit` runs after thread pools have refused work, which the stores write with. This is what
        # concurrent.futures itself hangs on.
        getattr(threading, "_register_atexit", atexit.register)(_finish_all)


def _finish_all() -> None:
    live = list(_live)
    deadline = max((each.deadline for each in live), default=0.0)
    for each in live:
        each.finish(deadline)


def _handle_sigterm() -> None:
    """Only if nobody else does, and only from the main thread, where Python allows it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number: int, _: FrameType | None) -> None:
    _finish_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
