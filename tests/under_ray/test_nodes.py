"""A watcher on each of two nodes: what a push, a kill, a hang and a board that is gone do to the engines."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray

from tests.waiting import until
from tests.watcher.publish import TestPublisher
from watchers.ray import Board, RayEngine, ask, by_node, node_of, open_board, watch

from .actors import Fake, call, kill, process, start

pytestmark = pytest.mark.slow

NEVER = 600.0
"""Seconds between polls: what comes within a test came by the board."""


class Run:
    """Two engines on the first node and one on the second, their watchers, a board, a trainer."""

    def __init__(self, nodes: list[str], folder: Any) -> None:
        self.nodes, self.root = nodes, str(folder / "root")
        self.publisher = TestPublisher(self.root)
        self.board = open_board(f"board-{uuid.uuid4().hex[:8]}", self.root)
        placed = {"a": nodes[0], "b": nodes[0], "c": nodes[1]}
        self.engines = {name: start(Fake, name, node=node) for name, node in placed.items()}
        engines = by_node(self.engines)
        engines[nodes[0]]["a"] = partial(RayEngine, self.engines["a"], name="a", timeout=5.0)
        stage = str(folder / "stage")
        self.watchers = watch(self.root, engines, stage=stage, board=self.board, poll=NEVER, events=False)

    def publish(self) -> str:
        """And push."""
        version = self.publisher.publish().id
        self.board.push(version)
        return version.label

    def serve(self, label: str, *engines: str) -> None:
        """Wait until they do, and look what they really hold."""
        self.board.wait_for(label, 120, engines or "abc")
        assert {call(self.engines[name], "held") for name in engines or "abc"} == {(label, False)}

    def health(self, name: str) -> Any:
        found = ask(self.watchers, "health", deadline=60).all()
        return {engine: health for each in found.values() for engine, health in each.items()}[name]


@pytest.fixture(scope="module")
def run(nodes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(nodes, tmp_path_factory.mktemp("run"))
    yield run
    ask(run.watchers, "stop", deadline=60).all()
    for actor in (*run.watchers.values(), *run.engines.values()):
        ray.kill(actor)


def test_a_push_brings_a_version_to_the_engines_of_every_node(run: Run) -> None:
    run.serve(run.publish())
    label = run.publish()
    run.serve(label)
    assert {node: node_of(watcher) for node, watcher in run.watchers.items()} == {node: node for node in run.nodes}
    health = ask(run.watchers, "health", deadline=60).all()
    assert {node: sorted(engines) for node, engines in health.items()} == {
        run.nodes[0]: ["a", "b"],
        run.nodes[1]: ["c"],
    }
    assert {each.version for engines in health.values() for each in engines.values()} == {label}


def test_every_node_goes_back_to_a_version_and_forward_again(run: Run) -> None:
    before = run.publish()
    run.serve(before)
    run.serve(run.publish())
    receipts = ask(run.watchers, "load_version", before, deadline=60).all()
    assert {receipt.version for receipt in receipts.values()} == {before}
    assert {call(engine, "held") for engine in run.engines.values()} == {(before, False)}
    newest = run.publish()
    ask(run.watchers, "load_version", "latest", deadline=60).all()
    run.serve(newest)


def test_a_watcher_that_was_killed_comes_back_and_brings_what_it_missed(run: Run) -> None:
    label = run.publish()
    run.serve(label)
    watcher = run.watchers[run.nodes[0]]
    before = kill(watcher)
    run.serve(run.publish())
    assert process(watcher) != before
    assert call(run.engines["a"], "calls").count(f"update {label}") == 1


def test_a_watcher_that_was_stopped_leaves_the_board_and_begins_again(run: Run) -> None:
    before = run.publish()
    run.serve(before)
    watcher = run.watchers[run.nodes[1]]
    call(watcher, "stop")
    until(lambda: sorted(run.board.standings()) == ["a", "b"], what="c to leave the board")
    label = run.publish()
    run.serve(label, "a", "b")
    assert call(run.engines["c"], "held") == (before, False)
    call(watcher, "run")
    run.serve(label)


def test_without_a_board_versions_are_found_by_polling_and_a_new_board_is_told_all(run: Run) -> None:
    run.serve(run.publish())
    ray.kill(_actor(run.board))
    until(lambda: not _actor(run.board), what="the board's end")
    label = run.publish()
    until(lambda: {run.health(name).version for name in "abc"} == {label}, 120, "the version without a board")
    run.board = open_board(run.board.name, run.root)
    run.serve(label)
    run.serve(run.publish())


def test_an_engine_that_hangs_keeps_no_other_waiting_and_is_named(run: Run) -> None:
    run.serve(run.publish())
    call(run.engines["a"], "tell", status="hang")
    label = run.publish()
    run.serve(label, "b", "c")
    until(lambda: "status: a did not answer within 5 s" in run.health("a").reason, what="the reason")
    assert not run.health("a").ready
    call(run.engines["a"], "tell")
    run.serve(label)


def _actor(board: Board) -> Any:
    try:
        return ray.get_actor(board.name, namespace=board.namespace)
    except ValueError:
        return None
