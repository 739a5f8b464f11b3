"""A trainer brings weights to members of a fleet past it."""

from __future__ import annotations

from collections.abc import Callable

from ckptsync.channel import Channel
from ckptsync.version import VersionId
from tests.waiting import until
from tests.watcher.publish import TestPublisher
from watchers.rollout import Quorum

from .conftest import Replicas, fakes

Fleets = Callable[..., Replicas]


def test_members_keep_what_a_trainer_brought_them_without_files_until_something_newer_comes(
    replicas: Fleets, publisher: TestPublisher, root: str
) -> None:
    """Before, a fleet loaded its files over a newer version that had come by a fast path."""
    fleet = replicas({"quorum": Quorum.parse("100%"), "at_once": 1}, **fakes("a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    Channel.open(root).note_sent(VersionId(1, 3))
    for engine in fleet.engines.values():
        engine.calls.clear()
        engine.label = "e1-v3"
    until(lambda: fleet.serve("e1-v3"))
    publisher.publish()  # e1-v2, which was late
    until(lambda: fleet.fleet.health.version == "e1-v2")
    assert fleet.serve("e1-v3")
    assert fleet.fleet.health.ready
    assert fleet.fleet.health.reason == ""
    assert not [call for engine in fleet.engines.values() for call in engine.calls if call.startswith("update")]
    fleet.fleet.load_version("e1-v2")
    until(lambda: fleet.serve("e1-v2"), what="by hand it goes back")
