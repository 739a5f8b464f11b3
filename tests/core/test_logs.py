"""Every line of a publish and of a watch says what it is about, in fields that any handler has."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from ckptsync import logs
from ckptsync.errors import CkptSyncError, EngineDirty, StoreUnavailable
from ckptsync.publish import Publisher
from ckptsync.store import LocalStore
from ckptsync.testing.engines import Failing
from ckptsync.testing.hooks import HookedStore
from ckptsync.version import VersionId
from tests.core.log_calls import calls, calls_in
from tests.watcher.actions import flip, shard_of
from tests.watcher.publish import SCHEMA, TestPublisher
from watchers.watcher import Watcher


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What is logged from now on, as any handler gets it; not by threads that an earlier test has left."""
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    seen: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread not in others:
                seen.append(record)

    handler, loggers = Keeping(), [logging.getLogger(name) for name in ("ckptsync", "watchers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield seen
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


def events(records: list[logging.LogRecord]) -> list[str]:
    return [logs.extras(record)["event"] for record in records]


def of(records: list[logging.LogRecord], event: str) -> logging.LogRecord:
    return next(record for record in records if logs.extras(record).get("event") == event)


def test_every_line_of_a_publish_has_channel_epoch_and_the_version(tmp_path, records):
    store = LocalStore(str(tmp_path))

    def full(operation: str, path: str) -> None:
        if operation in {"commit", "delete"} and "v00000003" in path and "safetensors" in path:
            raise StoreUnavailable(f"{path}: no answer")

    weights = {"layers.0.weight": torch.ones(64)}
    with Publisher(HookedStore(store, full), sweep_after=0.001) as publisher:
        publisher.publish(weights)
        publisher.publish(weights)  # unchanged: a warning
        with pytest.raises(StoreUnavailable):
            publisher.publish(weights)
        failed = publisher.publish(weights, background=True, number=3)
        with pytest.raises(StoreUnavailable):
            failed.result()
    assert events(records) == [
        "published", "unchanged", "published", "not-cleaned-up", "not-cleaned-up", "publish-failed",
    ]  # fmt: skip
    for record in records:
        assert (record.epoch, record.channel) == (1, store.url), record.getMessage()
    assert [record.version for record in records] == ["e1-v1", "e1-v2", "e1-v2", "e1-v3", "e1-v3", "e1-v3"]
    assert (of(records, "published").bytes > 0, of(records, "publish-failed").kind) == (True, "store-unavailable")


def test_every_line_of_a_watch_has_channel_reader_and_the_version_that_is_tried(tmp_path, records):
    publisher, engine = TestPublisher(str(tmp_path / "root")), Failing(SCHEMA)
    url = publisher.channel.store.url
    watcher = Watcher(url, engine, stage=str(tmp_path / "stage"), reader="r-0", events=False, poll=0.01, patience=0.0)
    publisher.publish()
    watcher.step()
    flip(shard_of(url, publisher.publish()))
    watcher.step()
    publisher.publish()
    engine.fail("update", EngineDirty)
    watcher.step()
    engine.fail("status", StoreUnavailable, times=2)
    watcher.step()
    assert events(records)[-1] == "away"
    watcher.step()
    watcher.close()
    seen = [(record.event, getattr(record, "version", ""), getattr(record, "epoch", 0)) for record in records]
    assert seen == [
        ("attempt-serving", "e1-v1", 1),
        ("refused", "e1-v2", 1),
        ("attempt-refused", "e1-v2", 1),
        ("not-loaded", "e1-v3", 1),
        ("attempt-failed", "e1-v3", 1),
        ("away", "", 0),
    ], "nothing is known of a version while the store does not answer"
    assert {(record.channel, record.reader, record.engine) for record in records} == {(url, "r-0", "fake")}
    assert [of(records, event).kind for event in ("attempt-failed", "refused", "away")] == [
        "engine-dirty", "bad-shard", "store-unavailable",
    ]  # fmt: skip
    assert of(records, "refused").in_receipt
    assert of(records, "attempt-serving").stage_seconds > 0


def test_every_line_of_the_packages_names_its_event():
    found = sorted(set(calls()))
    assert len(found) > 80
    assert [call.place for call in found if not call.event] == []


def test_a_line_without_an_event_is_noticed():
    code = (
        "def f(more):\n"
        "    log.info('a')\n"
        "    log.info('b', extra=more)\n"
        "    log.info('c', extra={'kind': 1})\n"
        "    log.info('d', extra={'event': 'x'})\n"
    )
    assert [call.event for call in calls_in(code, "f.py")] == [False, False, False, True]


def test_a_pools_threads_know_what_they_work_for_and_scopes_end(records):
    log = logs.get("ckptsync.test")
    with logs.scope(channel="c"), logs.Pool(1) as pool:
        logs.note(VersionId(2, 7))
        pool.submit(log.warning, "from a thread", extra={"event": "e"}).result()
        with logs.scope(channel="inner"):
            logs.note(VersionId(3, 1))
        log.warning("after the inner scope")
    log.warning("outside")
    inside, after, outside = map(logs.extras, records)
    assert inside == {"channel": "c", "version": "e2-v7", "epoch": 2, "event": "e"}
    assert (after["version"], outside) == ("e2-v7", {})


def test_as_json_a_line_is_one_object_with_every_field():
    log, lines = logs.get("ckptsync.test"), []
    handler = logging.StreamHandler()
    handler.setFormatter(logs.JsonFormatter())
    handler.emit = lambda record: lines.append(handler.format(record))
    log.logger.addHandler(handler)
    try:
        try:
            raise CkptSyncError("boom\nsecond line")
        except CkptSyncError as error:
            log.exception("%s failed", "it", extra=logs.about(VersionId(1, 2), event="x", cause=error))
    finally:
        log.logger.removeHandler(handler)
    (line,) = lines
    assert "\n" not in line
    found = json.loads(line)
    assert found["time"].endswith("Z")
    assert "CkptSyncError: boom" in found.pop("exception")
    assert {name: found[name] for name in ("level", "logger", "message", "version", "epoch", "event", "cause")} == {
        "level": "ERROR", "logger": "ckptsync.test", "message": "it failed", "version": "e1-v2", "epoch": 1,
        "event": "x", "cause": "boom\nsecond line",
    }  # fmt: skip


def test_the_command_line_logs_json_when_the_environment_says_so(tmp_path):
    publisher = TestPublisher(str(tmp_path))
    publisher.publish()
    torn = tmp_path / "manifests" / "e0001-v00000002.json"
    torn.write_text("{")
    command = [sys.executable, "-m", "ckptsync.cli", "show", str(tmp_path)]
    ran = subprocess.run(
        command, env={**os.environ, "CKPTSYNC_LOG": "json"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stderr.splitlines()[0])
    assert (found["event"], found["version"], found["epoch"]) == ("incomplete", "e1-v2", 1)
