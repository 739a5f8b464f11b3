"""`ckptsync doctor ROOT --full`: what a storage promises between two clients; real ones, and planted weaknesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from ckptsync import promises
from ckptsync.cli import app
from ckptsync.doctor import Check
from ckptsync.peer import serve
from ckptsync.store import LocalStore
from ckptsync.store.base import Store
from ckptsync.testing.stores import LetsBothWin, ListsLate, RemembersAbsence, TearsWrites
from tests.servers.fixtures import S3Root
from tests.servers.seaweed import S3Server
from tests.waiting import until

from .mounts import two_mounts

pytestmark = pytest.mark.slow

PROMISES = [*promises.PROMISES, "one small durable file"]


def run(root: str, *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = CliRunner().invoke(app, ["doctor", root, "--full", "--json", *options])
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@contextmanager
def in_memory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield folder


def test_two_processes_on_a_local_folder_see_each_other_at_once(tmp_path: os.PathLike[str]) -> None:
    code, checks = run(str(tmp_path))
    assert code == 0
    assert [checks[name]["status"] for name in PROMISES] == ["ok"] * len(PROMISES)
    assert "told of a new file" in checks["events"]["detail"]
    assert "of plain write and fsync" in checks["throughput against raw"]["detail"]
    assert [files for _, _, files in os.walk(tmp_path) if files] == []


def test_and_on_a_folder_in_memory() -> None:
    with in_memory() as folder:
        code, checks = run(folder)
    assert code == 0
    assert {checks[name]["status"] for name in PROMISES} == {"ok"}


@pytest.mark.s3
def test_and_in_a_bucket(s3_root: S3Root, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    code, checks = run(s3_root.url)
    assert code == 0
    # A replaced object is read in several requests, so a reader may meet two of them: only hints are ever replaced.
    rest = [name for name in PROMISES if name != "replacing is atomic"]
    assert [checks[name] for name in rest if checks[name]["status"] != "ok"] == []
    assert "0 by both" in checks["create-if-absent between clients"]["detail"]
    assert "watchers poll" in checks["events"]["detail"]


@pytest.mark.s3
def test_two_hosts_on_one_file_system_in_user_space(tmp_path: os.PathLike[str]) -> None:
    with two_mounts(str(tmp_path)) as (here, there):
        os.makedirs(f"{here}/run")
        other = [sys.executable, "-m", "ckptsync.cli", "doctor", f"{there}/run", "--peer", "--json"]
        with subprocess.Popen(other, stdout=subprocess.PIPE, text=True) as peer:
            try:
                _, checks = run(f"{here}/run", "--hosts", "2")
                answered, _ = peer.communicate(timeout=60)
            finally:
                peer.kill()
    assert json.loads(answered)["answered"] > 20
    assert set(PROMISES) <= set(checks)
    print({name: checks[name]["detail"] for name in PROMISES})


def lists_late(store: Store) -> Store:
    return ListsLate(store, 1.3, lambda folder: folder.endswith("/files"))


@pytest.mark.parametrize("first", ["who asks", "who answers"])
def test_either_process_may_be_first(first: str, tmp_path: os.PathLike[str]) -> None:
    store = LocalStore(str(tmp_path))
    with ThreadPoolExecutor(2) as pool:
        parts = [
            lambda: list(promises.examine_promises(store.url, store, hosts=2, only=["a new file"])),
            lambda: serve(store),
        ]
        begun = pool.submit(parts[first != "who asks"])
        if first == "who asks":
            until(lambda: list(store.list("doctor")), 120, "the session is open")
        other = pool.submit(parts[first == "who asks"])
        assert begun.result(60)
        assert other.result(60)


WEAK: dict[str, tuple[Callable[[Store], Store], str, str]] = {
    "two creators win": (LetsBothWin, "create-if-absent between clients", "one publisher at a time"),
    "absence is remembered": (
        lambda store: RemembersAbsence(store, 1.3),
        "a name that was looked for too early",
        "nothing to set",
    ),
    "listings are late": (lists_late, "a new file", "watch --poll"),
    "files are torn": (lambda store: TearsWrites(store, 0.05), "replacing is atomic", "never replaced"),
}


@pytest.mark.parametrize("weakness", WEAK)
def test_a_weakness_is_found_and_says_what_to_set(weakness: str, tmp_path: os.PathLike[str]) -> None:
    weaken, promise, remedy = WEAK[weakness]
    check = examined(LocalStore(str(tmp_path)), weaken, promise)
    assert check.status == "warn", check
    assert remedy in check.remedy


def examined(store: Store, weaken: Callable[[Store], Store], promise: str) -> Check:
    """What is found where both processes have a weak view of a store; the other one is a thread here."""
    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(serve, weaken(store))
        (found,) = promises.examine_promises(store.url, weaken(store), hosts=2, only=[promise])
        assert peer.result(30) > 0
    return found
