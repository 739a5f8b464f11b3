"""Two processes that share nothing but a store: one asks what the other sees, by files, and when it saw it.

    doctor/<session>/lead.json          the session is open
    doctor/<session>/ask-0003.json      a question
    doctor/<session>/ready-0003.json    the peer looks from now on
    doctor/<session>/answer-0003.json   what it saw

Messages are found by listing, under names never looked up before they exist, so that no cache of absent names has a
say in them.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from .errors import AlreadyExists, CkptSyncError, Conflict, Corrupt, InvalidInput, NotFound, StoreUnavailable
from .store.base import Store, put_bytes, read_bytes
from .store.local import LocalStore
from .trials import TRIALS, drop_folder

MAX_MESSAGE = 1 << 20
RACE_GAP = 0.02
"""Seconds between two names that are raced for."""

PAUSE = 0.005
"""Seconds between two looks."""


Message = TypeVar("Message", bound=msgspec.Struct)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What the peer is to do: one of the functions of `PEER_DOES`, by name."""

    what: str
    path: str = ""
    """What it is about, relative to the root."""

    seconds: float = 30.0
    """How long the peer looks at most."""

    begin: float = 0.0
    """When it begins, by the peer's clock; at once if that is over."""

    count: int = 0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the peer saw. `at` in seconds since 1970 by its clock; 0 if it never saw it."""

    at: float = 0.0
    counts: tuple[int, ...] = ()


class Conversation:
    """One end of a session. `remedy`: what to do if the other end is silent."""

    def __init__(self, store: Store, session: str, remedy: str) -> None:
        self.store, self.session, self.folder = store, session, f"{TRIALS}/{session}"
        self._remedy = remedy
        self._asked = 0

    def ask(self, question: Question, *, within: float = 60.0) -> int:
        """The question's number, as soon as the peer looks. Conflict if no peer does `within` so many seconds."""
        self._asked += 1
        self.say("ask", self._asked, question)
        self.hear("ready", self._asked, Question, within)
        return self._asked

    def answer(self, number: int, seconds: float) -> Answer:
        return self.hear("answer", number, Answer, seconds + 30.0)

    def end(self) -> None:
        """Tell the peer."""
        self.ask(Question(what="end"))

    def clear(self) -> None:
        """Take away what was said, and what one that was killed had begun to say."""
        for entry in list(self.store.list(self.folder)):
            self.store.delete(entry.path)
        if isinstance(self.store, LocalStore):
            self.store.sweep(self.folder, 0.0)
        drop_folder(self.store)

    def say(self, kind: str, number: int, message: msgspec.Struct) -> None:
        put_bytes(self.store, self._path(kind, number), msgspec.json.encode(message))

    def hear(self, kind: str, number: int, form: type[Message], seconds: float) -> Message:
        """The message, once it is there. Conflict if it does not come."""
        path, deadline = self._path(kind, number), time.monotonic() + seconds
        while (heard := self._heard(path, form)) is None:
            if time.monotonic() > deadline:
                raise Conflict(f"the other process did not answer within {seconds:.0f} s: {self._remedy}")
            time.sleep(PAUSE)
        return heard

    def _heard(self, path: str, form: type[Message]) -> Message | None:
        """None while it is not there, or not whole: the storage is on trial."""
        if not any(entry.path == path for entry in self.store.list(self.folder)):
            return None
        try:
            return msgspec.json.decode(read_bytes(self.store, path, MAX_MESSAGE), type=form)
        except (NotFound, Corrupt, msgspec.DecodeError):
            return None

    def _path(self, kind: str, number: int) -> str:
        return f"{self.folder}/{kind}-{number:04d}.json"


def serve(store: Store, session: str = "", *, wait: float = 600.0) -> int:
    """Answer the questions of one session until it ends, and say how many there were.

    Without `session` the newest that nobody answers yet, or the next, within `wait` seconds; Conflict if there is none,
    or if the other process is gone. A session that is left before its end is cleared: nobody else may be there to.
    """
    talk = Conversation(store, session or _opened(store, wait), "it is gone; start `ckptsync doctor ROOT --full` again")
    try:
        return _answer(talk)
    except BaseException:
        with suppress(CkptSyncError):
            talk.clear()
        raise


def _answer(talk: Conversation) -> int:
    store, number = talk.store, 0
    while True:
        number += 1
        question = talk.hear("ask", number, Question, 120.0)
        if question.what == "end":
            talk.say("ready", number, question)
            return number - 1
        if question.what not in PEER_DOES:
            raise InvalidInput(f"the other process asks for {question.what!r}: run the same release on both hosts")
        ready = functools.partial(talk.say, "ready", number, question)
        talk.say("answer", number, PEER_DOES[question.what](store, question, ready))


def end_with(pipe: int) -> None:
    """SIGTERM to this process once nobody holds the other end of the pipe: whoever did is gone, however it went."""

    def watch() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="ckptsync-doctor", daemon=True).start()


def _opened(store: Store, wait: float) -> str:
    """The newest session that nobody answers yet, whichever of the two processes was first."""
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        entries = list(store.list(TRIALS))
        answered = {entry.path.split("/")[1] for entry in entries if "/ready-" in entry.path}
        leads = [entry for entry in entries if entry.path.endswith("/lead.json")]
        if free := [entry for entry in leads if entry.path.split("/")[1] not in answered]:
            return max(free, key=lambda entry: entry.modified).path.split("/")[1]
        time.sleep(0.1)
    raise Conflict(f"nobody asked anything within {wait:.0f} s: run `ckptsync doctor ROOT --full --hosts 2` elsewhere")


# What a peer does. Each says that it is ready once it looks, and answers when it has seen what was asked for


def _tell_time(_store: Store, _question: Question, ready: Callable[[], None]) -> Answer:
    ready()
    return Answer(at=time.time())


def _wait_until_found(store: Store, question: Question, ready: Callable[[], None]) -> Answer:
    """Open a name that is not there yet, again and again: a cache of absent names is found out."""
    return _poll(question, lambda: _content(store, question.path) is not None, ready)


def _wait_until_listed(store: Store, question: Question, ready: Callable[[], None]) -> Answer:
    folder = question.path.rpartition("/")[0]
    return _poll(question, lambda: any(entry.path == question.path for entry in store.list(folder)), ready)


def _wait_until_changed(store: Store, question: Question, ready: Callable[[], None]) -> Answer:
    before = _content(store, question.path)
    return _poll(question, lambda: _content(store, question.path) != before, ready)


def _wait_until_gone(store: Store, question: Question, ready: Callable[[], None]) -> Answer:
    return _poll(question, lambda: _content(store, question.path) is None, ready)


def _poll(question: Question, seen: Callable[[], bool], ready: Callable[[], None]) -> Answer:
    seen()
    ready()
    deadline = time.monotonic() + question.seconds
    while time.monotonic() < deadline:
        if seen():
            return Answer(at=time.time())
        time.sleep(PAUSE)
    return Answer()


def _content(store: Store, path: str) -> bytes | None:
    try:
        return read_bytes(store, path, MAX_MESSAGE)
    except NotFound:
        return None


def _read_while_overwritten(store: Store, question: Question, ready: Callable[[], None]) -> Answer:
    """How often a file was read whole, and how often not: each of its versions is one byte, repeated."""
    ready()
    whole = torn = 0
    deadline = time.monotonic() + question.seconds
    while time.monotonic() < deadline:
        try:
            data = read_bytes(store, question.path, 1 << 26)
        except (NotFound, Corrupt, StoreUnavailable):
            data = b""
        good = len(data) == question.count and data.count(data[:1]) == len(data)
        whole, torn = whole + good, torn + (not good)
    return Answer(at=time.time(), counts=(whole, torn))


def race(store: Store, question: Question, ready: Callable[[], None]) -> Answer:
    """Create `count` names, each at a moment that both sides know, and say which were won."""
    ready()
    won = []
    for number in range(question.count):
        time.sleep(max(0.0, question.begin + number * RACE_GAP - time.time()))
        try:
            store.create(f"{question.path}/{number:04d}", os.urandom(16))
            won.append(number)
        except AlreadyExists:
            continue
    return Answer(at=time.time(), counts=tuple(won))


def _wait_for_event(store: Store, question: Question, ready: Callable[[], None]) -> Answer:
    """Whether the operating system tells of a file that the other side makes (inotify)."""
    if not isinstance(store, LocalStore):
        ready()
        return Answer()
    seen = _Seen(question.path.rpartition("/")[2])
    observer = Observer()
    observer.schedule(seen, os.path.join(store.url, question.path.rpartition("/")[0]))
    observer.start()
    try:
        ready()
        seen.event.wait(question.seconds)
    finally:
        observer.stop()
        observer.join()
    return Answer(at=seen.at)


class _Seen(FileSystemEventHandler):
    def __init__(self, name: str) -> None:
        self.event, self.at, self._name = threading.Event(), 0.0, name

    def on_any_event(self, event: FileSystemEvent) -> None:
        paths = (os.fsdecode(event.src_path), os.fsdecode(event.dest_path or ""))
        if not self.event.is_set() and any(os.path.basename(path) == self._name for path in paths):
            self.at = time.time()
            self.event.set()


PEER_DOES: dict[str, Callable[[Store, Question, Callable[[], None]], Answer]] = {
    "time": _tell_time,
    "found": _wait_until_found,
    "listed": _wait_until_listed,
    "changed": _wait_until_changed,
    "gone": _wait_until_gone,
    "read": _read_while_overwritten,
    "race": race,
    "event": _wait_for_event,
}
