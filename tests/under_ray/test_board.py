"""The board: news, the freshness gate, staleness, and what is left of it when it is killed."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from ckptsync.errors import InvalidInput, InvalidName
from ckptsync.version import VersionId
from tests.waiting import until
from tests.watcher.publish import TestPublisher
from watchers.ray import Board, BoardUnavailable, News, NotFresh, open_board

from .actors import process

pytestmark = pytest.mark.slow

V1, V2, V3 = (VersionId(1, number) for number in (1, 2, 3))


@pytest.fixture
def root(tmp_path: Any) -> str:
    return str(tmp_path / "root")


@pytest.fixture
def board(nodes: list[str], root: str) -> Iterator[Board]:
    board = open_board(f"board-{uuid.uuid4().hex[:8]}", root)
    yield board
    ray.kill(ray.get_actor(board.name, namespace=board.namespace))


def test_who_waits_hears_of_a_push_and_an_older_version_is_no_news(board: Board) -> None:
    assert board.newest() is None
    heard: list[News | None] = []
    waiting = threading.Thread(target=lambda: heard.append(board.wait(V1, timeout=60)))
    waiting.start()
    board.push(V1, step=10)  # what is waited for is newer than this
    board.push("e1-v2", step=20)
    waiting.join(60)
    assert heard == [News(V2, 20)]
    board.push(V1)
    assert board.wait(V2, timeout=0.2) is None
    assert board.newest() == News(V2, 20)
    with pytest.raises(InvalidName, match="'v2' is not the label of a version"):
        board.push("v2")


def test_a_board_is_joined_by_who_means_the_same_root_and_nobody_else(board: Board, root: str, tmp_path: Any) -> None:
    assert open_board(board.name, root + "/").name == board.name
    assert open_board(board.name).name == board.name
    with pytest.raises(InvalidInput, match=f"is that of {root}, not of"):
        open_board(board.name, str(tmp_path / "other"))


def test_the_gate_opens_when_every_engine_serves_the_version_and_names_who_does_not(board: Board) -> None:
    board.serving("a", V2)
    board.serving("b", V1)
    until(lambda: len(board.standings()) == 2)
    with pytest.raises(NotFresh, match=r"not at e1-v2 within 0.1 s: b serves e1-v1, said \d+ s ago$") as caught:
        board.wait_for(V2, 0.1)
    assert caught.value.behind["b"].version == V1
    with pytest.raises(NotFresh, match="c serves nothing"):
        board.wait_for(V1, 0.1, ["a", "c"])
    assert board.wait_for(V2, 0.1, ["a"])["a"].version == V2
    opened: list[Any] = []
    waiting = threading.Thread(target=lambda: opened.append(board.wait_for(V2, 60)))
    waiting.start()
    board.serving("b", "e1-v3")
    waiting.join(60)
    assert opened[0]["b"].version == V3
    board.serving("a", None)
    board.forget("a")
    until(lambda: list(board.standings()) == ["b"])
    assert list(board.wait_for(V3, 10)) == ["b"]


def test_rollouts_are_counted_by_how_many_versions_they_are_behind(board: Board) -> None:
    for version in (V1, V2):
        board.push(version)
    assert board.wait(V1, timeout=60)
    board.used(V2, rollouts=3)
    board.used(V1)
    until(lambda: board.staleness() == {0: 3, 1: 1})
    board.push(VersionId(2, 2))  # resumed from the first: the second is a version behind too
    assert board.wait(V2, timeout=60)
    board.used(V2, rollouts=2)
    until(lambda: board.staleness() == {0: 3, 1: 3})


def test_a_board_that_was_killed_knows_what_the_store_knows(board: Board, root: str) -> None:
    publisher = TestPublisher(root)
    for step in range(2):
        board.push(publisher.publish(metadata={"step": step}).id, step=step)
    actor = ray.get_actor(board.name, namespace=board.namespace)
    before = process(actor)
    publisher.publish()  # and nobody pushes it
    os.kill(before, signal.SIGKILL)
    until(lambda: _newest(board) == V3, seconds=60, what="the board's restart")
    assert process(actor) != before
    board.used(V1)
    until(lambda: board.staleness() == {2: 1})


def test_without_a_board_reports_are_lost_and_questions_say_so(board: Board) -> None:
    nobody = Board("nobody", board.namespace)
    nobody.push(V1)
    nobody.used(V1)
    with pytest.raises(BoardUnavailable, match="there is no board 'nobody'"):
        nobody.newest()


def _newest(board: Board) -> VersionId | None:
    try:
        news = board.newest()
    except BoardUnavailable:
        return None
    return news.version if news else None
