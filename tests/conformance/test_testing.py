"""ckptsync.testing itself: a harness that misses a point, or a machine that looks away, would say that all is well."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from ckptsync.errors import InvalidInput
from ckptsync.store import LocalStore
from ckptsync.store.base import Store, put_bytes
from ckptsync.testing.crashes import crash_points, killed_at

FORKED = multiprocessing.get_context("fork")


@pytest.fixture
def fresh(tmp_path: Any) -> Callable[[], str]:
    numbers = iter(range(100))
    return lambda: str(tmp_path / str(next(numbers)))


def three(store: Store) -> None:
    store.create("one", b"1")
    put_bytes(store, "two", b"2")
    store.delete("one")


def test_a_script_is_killed_before_each_of_its_changes_and_leaves_what_came_before(fresh: Callable[[], str]) -> None:
    left = {
        (crash.at, crash.operation, crash.path): sorted(entry.path for entry in LocalStore(crash.root).list(""))
        for crash in crash_points(three, fresh, context=FORKED)
    }
    assert left == {
        (0, "create", "one"): [],
        (1, "write", "two"): ["one"],
        (2, "append", "two"): ["one"],
        (3, "commit", "two"): ["one"],
        (4, "delete", "one"): ["one", "two"],
    }


def test_just_before_the_kill_something_else_may_be_done_to_the_storage(fresh: Callable[[], str]) -> None:
    root = fresh()
    killed = killed_at(three, root, 1, just_before=lambda: LocalStore(root).delete("one"), context=FORKED)
    assert killed
    assert list(LocalStore(root).list("")) == []


def test_a_script_that_lives_is_no_crash(fresh: Callable[[], str]) -> None:
    assert not killed_at(three, fresh(), 5, context=FORKED)


def another_time(store: Store) -> None:
    store.create("one", b"1")
    if multiprocessing.parent_process() is None:
        store.create("two", b"2")


def test_a_script_that_does_something_else_the_next_time_is_refused(fresh: Callable[[], str]) -> None:
    with pytest.raises(InvalidInput, match=r"came to its end before its change 1, create two"):
        list(crash_points(another_time, fresh, context=FORKED))


def endless(store: Store) -> None:
    time.sleep(300)


def test_a_script_that_hangs_is_ended(fresh: Callable[[], str]) -> None:
    with pytest.raises(TimeoutError, match="still running"):
        killed_at(endless, fresh(), 0, seconds=0.5, context=FORKED)


@pytest.mark.parametrize(
    ("module", "lacks"), [("strategies", "hypothesis"), ("lifecycle", "hypothesis"), ("contract", "pytest")]
)
def test_without_its_extra_a_module_says_which_one_to_install(module: str, lacks: str) -> None:
    name = f"ckptsync.testing.{module}"
    with mock.patch.dict(sys.modules, {lacks: None}):
        sys.modules.pop(name, None)
        with pytest.raises(InvalidInput, match=rf"needs {lacks}: pip install 'ckptsync\[testing\]'"):
            importlib.import_module(name)
