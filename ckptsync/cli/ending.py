"""How a command ends: on its own, told to, or by an error that is said in one line."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec

import typer

from .. import logs
from ..errors import CkptSyncError, InvalidInput
from .output import BAD, USAGE, err, print_json

log = logs.get(__name__)

P = ParamSpec("P")

UsageError: Any = typer.BadParameter.__base__
"""click's, which typer carries a copy of in some releases and imports in others."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextmanager
def tidies_up() -> Iterator[None]:
    """SIGTERM, or a terminal that is closed, ends the body as Ctrl-C does: what it was making is taken away on the way
    out."""
    before = {each: signal.signal(each, lambda number, _: sys.exit(128 + number)) for each in _ends()}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _ends() -> list[signal.Signals]:
    """SIGHUP unless `nohup` said that it is to go on."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGTERM, *hangup]


def exit_code(command: Callable[[], int | None]) -> int:
    """Run it. What it raises on purpose, what its call lacks, and what the system would not read or write is one line
    on stderr, and with --json an object on stdout too. Quiet for who stopped reading, as `head` does."""
    try:
        code = _reported(command)
        sys.stdout.flush()
    except OSError as error:
        return _of_system(error)
    return code


def _reported(command: Callable[[], int | None]) -> int:
    try:
        return command() or 0
    except CkptSyncError as error:
        return _report(error.kind, str(error), USAGE if isinstance(error, InvalidInput) else BAD)
    except UsageError as error:
        return _report(InvalidInput.kind, error.format_message(), USAGE, show=partial(_show_usage, error))
    except (KeyboardInterrupt, typer.Abort):
        err.print("interrupted")
        return 128 + signal.SIGINT


def told_to_end() -> threading.Event:
    """Set by SIGTERM, Ctrl-C and a terminal that is closed, from now on, for a command that goes on until then."""
    stop = threading.Event()
    for each in (signal.SIGINT, *_ends()):
        signal.signal(each, lambda *_: stop.set())
    return stop


def as_it_goes(say: Callable[P, None], stop: threading.Event) -> Callable[P, None]:
    """`say`, for a command that goes on. A stdout that cannot be written, such as a full disk, costs what would have
    been said, with one warning; who stopped reading, as `head` does, ends the command."""
    failed = ""

    def said(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal failed
        try:
            say(*args, **kwargs)
            failed = ""
        except BrokenPipeError:
            stop.set()
        except OSError as error:
            if failed != str(error):
                more = {"event": "no-output"}
                log.warning("stdout cannot be written (%s); all else goes on", error.strerror, extra=more)
            failed = str(error)

    return said


def _of_system(error: OSError) -> int:
    """A file has a name; a full disk without one is below the command's own output, to which nothing more goes."""
    from ..store.translate import translate

    _drop_unwritten()
    if isinstance(error, BrokenPipeError):
        return BAD
    log.debug("where it was raised", exc_info=error, extra={"event": "system-error"})
    is_output = error.filename is None and error.errno in _FULL
    found = translate(error, "writing the output" if is_output else error.filename or "the system said no")
    kind, message = (found.kind, str(found)) if found else (CkptSyncError.kind, str(error))
    return _report(kind, message, BAD, as_json=not is_output)


def _show_usage(error: Any) -> None:
    from typer.rich_utils import rich_format_error  # a third of the time in which `--version` is printed

    rich_format_error(error)


def _drop_unwritten() -> None:
    """Else the interpreter tries again at its end, prints a traceback and changes the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(kind: str, message: str, code: int, *, show: Callable[[], None] | None = None, as_json: bool = True) -> int:
    if as_json and "--json" in sys.argv:
        print_json({"error": {"kind": kind, "message": message}})
    if any(isinstance(handler.formatter, logs.JsonFormatter) for handler in logging.getLogger().handlers):
        log.error("%s", message, extra={"event": kind})
    elif show is not None:
        show()
    else:
        err.print(f"[bold red]{kind}[/]: ", end="")
        err.print(message, markup=False, highlight=False)
    return code
