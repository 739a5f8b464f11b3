"""Log lines that a machine can group: every record carries the version, epoch, channel and reader that it is about.

They are plain attributes of the record, as `extra` makes them, so any handler has them: the JSON formatter here, a
trainer's own, or OpenTelemetry's, which takes them over as attributes. What is not known is absent. Nothing here
installs a handler: a library does not.

    handler = logging.StreamHandler()
    handler.setFormatter(ckptsync.logs.JsonFormatter())
    logging.getLogger("ckptsync").addHandler(handler)
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import msgspec

from . import host
from .errors import StoreUnavailable
from .version import VersionId

P = ParamSpec("P")
T = TypeVar("T")

_fields: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("ckptsync_log_fields")
_BUILT_IN = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records carry what is known here; a call's own `extra` goes first. `event` there is a stable
    name of what happened, for dashboards and alerts: the message is for people."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**current(), **(kwargs.get("extra") or {})}}


def get(name: str) -> Log:
    """The module's logger."""
    return Log(logging.getLogger(name), None)


def about(version: VersionId, **fields: Any) -> dict[str, Any]:
    """`extra` of a line about this version."""
    return {"version": version.label, "epoch": version.epoch, **fields}


@contextmanager
def scope(**fields: Any) -> Iterator[None]:
    """Lines logged inside carry these too, in whichever module."""
    token = _fields.set({**current(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


def note(version: VersionId) -> None:
    """From here to the end of the scope it is about this version; also for whoever shares `current()`."""
    current().update(about(version))


def current() -> dict[str, Any]:
    """What is known here, as it grows. Nothing outside a scope."""
    return _fields.get(None) or {}


class Pool(ThreadPoolExecutor):
    """Threads whose lines carry what was known where the work was given to them. As many as asked for, or as the host
    has: StoreUnavailable if that is none."""

    def _adjust_thread_count(self) -> None:
        # Called once the work is in the queue: a thread that cannot be had must not fail `submit`, since those that are
        # there do the work all the same, on files that the caller closes after an error.
        with contextlib.suppress(StoreUnavailable) if self._threads else contextlib.nullcontext(), host.threads():
            super()._adjust_thread_count()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(contextvars.copy_context().run, functools.partial(fn, *args, **kwargs))


class JsonFormatter(logging.Formatter):
    """One JSON object on a line: `time` (UTC), `level`, `logger`, `message`, every `extra`, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def extras(record: logging.LogRecord) -> Mapping[str, Any]:
    """What `extra` added to a record; not what others keep there for themselves (Ray's `_ray_timestamp_ns`)."""
    own = vars(record).keys() - _BUILT_IN
    return {name: value for name, value in vars(record).items() if name in own and not name.startswith("_")}
