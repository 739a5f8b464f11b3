"""What a host does to a command that goes on: its output runs full, its reader leaves, its terminal is closed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.waiting import until
from tests.watcher.publish import TestPublisher

PLAYED = """
import signal
from ckptsync.cli import engines, main
from ckptsync.testing.engines import FakeEngine
from tests.watcher.publish import SCHEMA

class Played(FakeEngine):
    def __init__(self, url):
        super().__init__(SCHEMA)
        self.url = url
    name = property(lambda self: self.url)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, tests too are started without
engines.connect = lambda kind, url, **_: Played(url)
main()
"""
"""`ckptsync` whose engines are played, each URL by one of its own."""

ONE, TWO = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


@pytest.fixture
def publisher(root: str) -> TestPublisher:
    return TestPublisher(root)


@pytest.fixture
def watch(root: str, tmp_path: Any) -> Iterator[Any]:
    with ExitStack() as started:

        def begin(*urls: str, **streams: Any) -> subprocess.Popen[str]:
            options = ["--engine", "module", "--stage", str(tmp_path / "stage"), "--reader", "r", "--poll", "0.05"]
            listed = [word for url in urls for word in ("--url", url)]
            command = [sys.executable, "-c", PLAYED, "watch", root, *options, *listed, "--json"]
            env = {**os.environ, "TMPDIR": str(tmp_path)}
            process = started.enter_context(subprocess.Popen(command, text=True, env=env, **streams))
            started.callback(process.kill)
            return process

        yield begin


def confirmed(root: str, reader: str) -> str:
    """What the reader's receipt in the channel says."""
    try:
        with open(f"{root}/receipts/{reader}.json", encoding="utf-8") as file:
            return str(json.load(file)["label"])
    except FileNotFoundError:
        return ""


def test_a_log_on_a_full_disk_ends_no_watcher_and_a_closed_terminal_ends_it_in_peace(root, publisher, watch) -> None:
    publisher.publish()
    with open("/dev/full", "w") as full:
        process = watch(ONE, stdout=full, stderr=full)
    for label in ("e1-v1", "e1-v2"):
        until(lambda label=label: confirmed(root, "r") == label or process.poll() is not None)
        assert process.poll() is None
        publisher.publish()
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0
    assert confirmed(root, "r") == "", "it has withdrawn its receipt"


def test_a_full_disk_behind_stdout_is_said_once_and_the_watcher_goes_on(root, publisher, watch) -> None:
    publisher.publish()
    with open("/dev/full", "w") as full:
        process = watch(ONE, stdout=full, stderr=subprocess.PIPE)
    until(lambda: confirmed(root, "r") == "e1-v1")
    publisher.publish()
    until(lambda: confirmed(root, "r") == "e1-v2")
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert said.count("stdout cannot be written (No space left on device); all else goes on") == 1, said
    assert "Traceback" not in said


@pytest.mark.parametrize("urls", [(ONE,), (ONE, TWO)], ids=["one engine", "a fleet"])
def test_who_stops_reading_ends_the_watcher_as_head_does(root, publisher, watch, urls) -> None:
    publisher.publish()
    process = watch(*urls, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert json.loads(process.stdout.readline())["state"] == "serving"
    process.stdout.close()
    publisher.publish()
    assert process.wait(60) == 0
    said = process.stderr.read()
    assert "Traceback" not in said, said
    assert "watch-ended" not in said
