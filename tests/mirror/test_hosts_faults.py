"""A mirror that follows goes on after either of its roots was not mounted for a while."""

from __future__ import annotations

import os
import threading

import pytest

from ckptsync.channel import Channel
from ckptsync.mirror import Mirror
from tests.host import unmounted
from tests.waiting import until
from tests.watcher.publish import TestPublisher


@pytest.mark.parametrize("away", ["source", "target"])
def test_a_root_that_is_not_mounted_is_waited_for(tmp_path, caplog, away) -> None:
    source, target, stop = str(tmp_path / "source"), str(tmp_path / "target"), threading.Event()
    publisher = TestPublisher(source)
    publisher.publish()
    mirror = Mirror(source, target)
    thread = threading.Thread(target=mirror.follow, args=(stop,), kwargs={"poll": 0.02})
    thread.start()
    try:
        until(lambda: len(Channel.open(target).versions()) == 1)
        with unmounted(str(tmp_path / away)):
            if away == "target":
                publisher.publish()
            until(lambda: "is it mounted?" in caplog.text or not thread.is_alive())
        publisher.publish()
        until(lambda: Channel.open(target).versions() == Channel.open(source).versions() or not thread.is_alive())
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join(60)
    assert "manifests" not in os.listdir(tmp_path / f"{away}-under"), "a pass that was under way has committed nothing"
