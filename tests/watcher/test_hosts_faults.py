"""What a host does to a watcher passes, and costs it nothing but time: files, threads, the stage, the root's mount."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from ckptsync.errors import StoreUnavailable
from ckptsync.store import LocalStore
from ckptsync.testing.engines import FakeEngine
from ckptsync.testing.hooks import Failing, HookedStore, matching
from tests.host import files, open_files, threads, unmounted
from tests.waiting import until
from watchers.discover import Wake
from watchers.health import Health
from watchers.stage import Stage
from watchers.watcher import Watcher

from .publish import SCHEMA, TestPublisher

Watch = Callable[..., Watcher]


class Reads(FakeEngine):
    """Loads what is in the folder, as engines do."""

    def update(self, version: StagedVersion) -> None:
        assert "model.safetensors.index.json" in os.listdir(version.folder)
        super().update(version)


def serves(watcher: Watcher, label: str) -> bool:
    watcher.step()
    return watcher.health.ready and watcher.health.version == label


@pytest.mark.parametrize("limit", [files, threads])
def test_a_host_that_gives_no_more_files_or_threads_is_waited_for(
    watch: Watch, publisher: TestPublisher, tmp_path: Any, limit: Callable[[int], Any]
) -> None:
    publisher.publish()
    for count in (0, 1, 2, 5):
        watcher = watch(FakeEngine(SCHEMA), stage=str(tmp_path / f"{limit.__name__}-{count}"))
        watcher.channel.store.deadline = 0.05  # type: ignore[attr-defined]
        with limit(count):
            watcher.step()
            said, serving = watcher.health.reason, watcher.health.ready
        assert serving or "ulimit" in said, said
        until(lambda watcher=watcher: serves(watcher, "e1-v1"))


def test_a_stage_that_gets_no_thread_leaves_no_file_open(root: str, publisher: TestPublisher, folder: str) -> None:
    channel, manifest, stage = Channel.open(root), publisher.publish(), Stage(folder)
    before = open_files()
    for _ in range(3):
        with threads(0), pytest.raises(StoreUnavailable, match="no more threads: raise `ulimit -u`"):
            stage.stage(channel, manifest)
    assert open_files() == before
    with threads(1):
        stage.stage(channel, manifest)


def test_what_an_engine_lost_is_staged_again_if_the_stage_was_emptied_meanwhile(
    watch: Watch, publisher: TestPublisher, folder: str
) -> None:
    publisher.publish()
    engine = Reads(SCHEMA)
    watcher = watch(engine)
    until(lambda: serves(watcher, "e1-v1"))
    shutil.rmtree(folder)
    engine.restart()
    until(lambda: serves(watcher, "e1-v1"))
    assert (engine.label, engine.paused) == ("e1-v1", False)


def test_a_newer_version_is_loaded_if_what_an_engine_lost_is_neither_staged_nor_on_the_store(
    watch: Watch, publisher: TestPublisher, folder: str, root: str
) -> None:
    first = publisher.publish()
    engine = Reads(SCHEMA)
    watcher = watch(engine)
    until(lambda: serves(watcher, "e1-v1"))
    publisher.publish()
    shutil.rmtree(folder)
    shutil.rmtree(f"{root}/{first.folder}")
    engine.restart()
    until(lambda: serves(watcher, "e1-v2"))


def test_a_version_whose_root_is_unmounted_while_it_is_staged_is_loaded_once_it_is_back(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    mount: list[Any] = []

    def changed(health: Health) -> None:
        if health.state == "staging" and not mount:
            mount.append(unmounted(root))
            mount[0].__enter__()

    publisher.publish()
    watcher = watch(FakeEngine(SCHEMA), on_change=changed)
    watcher.step()
    assert f"{root} holds no channel any more (channel.json is gone): is it mounted?" in watcher.health.reason
    mount[0].__exit__(None, None, None)
    until(lambda: serves(watcher, "e1-v1"))
    assert os.listdir(f"{root}-under") == [], "some file systems are not mounted on a folder that is not empty"


def test_a_version_that_seemed_collected_and_is_listed_is_tried_again(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    manifest = publisher.publish()
    path = f"{root}/manifests/{manifest.id.stem}.json"
    gone: list[str] = []

    def changed(health: Health) -> None:
        if health.state == "staging" and not gone:
            gone.append(path)
            os.rename(path, f"{path}-away")
            os.rename(f"{root}/data", f"{root}/data-away")

    watcher = watch(FakeEngine(SCHEMA), on_change=changed)
    watcher.step()
    assert "was collected from" in watcher.health.reason
    os.rename(f"{root}/data-away", f"{root}/data")
    os.rename(f"{path}-away", path)
    until(lambda: serves(watcher, "e1-v1"))


def test_a_lease_that_could_not_be_written_once_is_written_again(
    root: str, publisher: TestPublisher, folder: str
) -> None:
    away = Failing(lambda: StoreUnavailable("away"), matching("write", part="leases/"), times=1)
    channel, stage = Channel.open(HookedStore(LocalStore(root), away)), Stage(folder)
    stage.stage(channel, publisher.publish(), reader="r")
    leases: list[str] = []
    stage.stage(channel, publisher.publish(), lambda _: leases.extend(os.listdir(f"{root}/leases")), reader="r")
    assert "r.json" in leases


@pytest.mark.parametrize("count", [0, 1, 2])
def test_without_a_thread_for_file_system_events_a_watcher_polls(
    root: str, publisher: TestPublisher, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    publisher.publish()
    wake = Wake(root)
    with threads(count):
        wake.wait(threading.Event(), 0.01)
    wake.wait(threading.Event(), 0.01)
    wake.close()
    assert f"no file system events for {root} (this host gives no more threads" in caplog.text
