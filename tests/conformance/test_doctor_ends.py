"""`ckptsync doctor ROOT --full` that is ended in the middle leaves no process and no file; nor does a good run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptsync import promises
from ckptsync.channel import Channel
from ckptsync.doctor import examine
from ckptsync.errors import Conflict
from ckptsync.peer import Conversation, Question
from ckptsync.store import LocalStore
from ckptsync.store.base import put_bytes
from ckptsync.trials import STALE, TRIALS
from tests.waiting import until


@contextmanager
def in_the_middle(root: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The first process, and the number of the second, once that answers."""
    command = [sys.executable, "-m", "ckptsync.cli", "doctor", root, "--full"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        try:
            until(lambda: any("/answer-" in path for path in trials(root)), 60, "the second process answers")
            with open(f"/proc/{first.pid}/task/{first.pid}/children") as children:
                (second,) = map(int, children.read().split())
            yield first, second
        finally:
            first.kill()


def trials(root: str) -> list[str]:
    return [entry.path for entry in LocalStore(root).list(TRIALS)]


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return bool(file.read())  # that of a zombie is empty
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda by: by.name)
def test_ended_in_the_middle_nothing_stays(by: signal.Signals, tmp_path: os.PathLike[str]) -> None:
    root = str(tmp_path)
    with in_the_middle(root) as (first, second):
        first.send_signal(by)
        first.wait(30)
        until(lambda: not is_running(second), 30, "the second process ends")
    assert os.listdir(root) == []


def test_what_a_killed_process_had_begun_to_write_goes_with_its_session_though_nobody_has_waited_for_it(
    tmp_path: os.PathLike[str],
) -> None:
    talk = Conversation(LocalStore(str(tmp_path)), "session", "")
    talk.say("ask", 1, Question(what="time"))
    writes = f"open({str(tmp_path)!r} + '/{talk.folder}/' + temporary_name(), 'x').close()"
    with subprocess.Popen([sys.executable, "-c", f"from ckptsync.store.paths import temporary_name; {writes}"]) as dead:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        talk.clear()
        assert os.listdir(tmp_path) == []


def test_the_next_run_takes_away_what_one_left_that_could_not(tmp_path: os.PathLike[str]) -> None:
    store = LocalStore(str(tmp_path))
    put_bytes(store, f"{TRIALS}/old/lead.json", b"{}")
    over = time.time() - STALE - 120
    os.utime(f"{store.url}/{TRIALS}/old/lead.json", (over, over))
    put_bytes(store, f"{TRIALS}/young/lead.json", b"{}")
    assert [check.status for check in examine(Channel(store), str(tmp_path)) if check.name == "visibility"] == ["ok"]
    assert trials(store.url) == [f"{TRIALS}/young/lead.json"]


def test_after_a_good_run_the_folder_is_gone(tmp_path: os.PathLike[str]) -> None:
    store = LocalStore(str(tmp_path))
    list(examine(Channel(store), str(tmp_path)))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("hosts", "remedy"), [(1, "the second process ended"), (2, "ckptsync doctor {} --peer")])
def test_who_is_not_answered_is_told_what_to_run(
    hosts: int, remedy: str, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conversation, "ask", lambda talk, _, within: talk.hear("ready", 1, Question, 0.0))
    monkeypatch.setattr(promises, "_second", lambda *_: promises.nullcontext())
    root = str(tmp_path)
    with pytest.raises(Conflict) as caught:
        list(promises.examine_promises(root, LocalStore(root), hosts=hosts))
    assert remedy.format(root) in str(caught.value)
    assert os.listdir(root) == []
