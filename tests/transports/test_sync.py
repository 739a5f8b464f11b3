"""One counter whichever way the weights went: numbers, epochs, the fence, file versions behind a fast path."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.errors import Fenced, InvalidInput, StoreFull, StoreUnavailable
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.testing.hooks import Failing, HookedStore, matching
from ckptsync.transports import Checkpoint
from ckptsync.transports.handover import takes_over
from tests.lora.models import TinyLM, with_adapter

from .fakes import Box, Carrier
from .jobs import a_sync


@pytest.fixture
def root(tmp_path: Any) -> str:
    return str(tmp_path / "root")


def model(step: int = 0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((4,), float(step)), "b": torch.ones(3)}


def versions(root: str) -> list[str]:
    return [str(version) for version in Channel.open(root).versions()]


def test_versions_by_a_fast_path_and_by_files_have_one_counter(root: str) -> None:
    box, fast = Box("a"), Carrier()
    with a_sync(root, [fast, Checkpoint()], [box]) as sync:
        labels = []
        for step in range(1, 6):
            fast.fault = "start" if step in (2, 4) else ""
            fast.times = 1
            done = sync.sync(model(step), step=step)
            labels.append((str(done.version), done.transport, str(sync.version)))
    assert labels == [
        ("e1-v1", "fast", "e1-v1"),
        ("e1-v2", "checkpoint", "e1-v1"),  # in the channel; the engine has not confirmed it
        ("e1-v3", "fast", "e1-v3"),
        ("e1-v4", "checkpoint", "e1-v3"),
        ("e1-v5", "fast", "e1-v5"),
    ]
    assert versions(root) == ["e1-v2", "e1-v4"]
    assert box.status().version == sync.version


def test_a_trainer_that_resumes_goes_on_from_the_newest_files_in_a_newer_epoch(root: str) -> None:
    box = Box("a")
    with a_sync(root, [Carrier()], [box], persist_every=2) as sync:
        for step in range(1, 4):
            sync.sync(model(step), step=step)
    assert (versions(root), box.label) == (["e1-v2"], "e1-v3")
    with a_sync(root, [Carrier()], [box]) as sync:
        assert str(sync.sync(model(), step=3).version) == "e2-v3"
    assert box.label == "e2-v3"


def test_a_trainer_that_was_superseded_sends_by_no_way(root: str) -> None:
    box = Box("a")
    with a_sync(root, [Carrier()], [box]) as old, a_sync(root, [Carrier()], [box]) as new:
        new.sync(model(2))
        with pytest.raises(Fenced):
            old.sync(model(1))
    assert (box.label, box.paused) == ("e2-v1", False)


def test_weights_that_need_no_store_do_not_wait_for_it(root: str) -> None:
    away = Failing(lambda: StoreUnavailable("no route to host"), lambda *_: True, times=0)
    box = Box("a")
    with a_sync(HookedStore(open_store(root), away), [Carrier()], [box]) as sync:
        away.times = 99
        assert str(sync.sync(model()).version) == "e1-v1"
        away.times = 0
        assert str(sync.sync(model()).version) == "e1-v2"
    assert box.label == "e1-v2"


def test_an_adapter_without_a_fast_path_goes_by_files(root: str) -> None:
    with a_sync(root, [Checkpoint()], []) as sync:
        done = sync.sync(with_adapter(TinyLM(), 1, task_type=None), kind="adapter")
    assert (done.transport, done.version) == ("checkpoint", sync.version)
    assert Channel.open(root).latest().kind == "adapter"


def test_an_engine_that_holds_it_and_cannot_be_resumed_is_not_called_confirmed(root: str) -> None:
    box = Box("a")
    resume, box.resume = box.resume, lambda: 1 / 0  # type: ignore[method-assign, assignment]
    with a_sync(root, [Carrier()], [box]) as sync:
        done = sync.sync(model(1))
        assert (done.behind, done.dirty, sync.version) == ({"a": "e1-v1, paused"}, (), None)
        box.resume = resume  # type: ignore[method-assign]
        assert sync.sync(model(2)).confirmed == ("a",)
    assert not box.paused


def test_every_kth_version_gets_files_in_the_background_under_its_own_number(root: str) -> None:
    with a_sync(root, [Carrier()], [Box("a")], persist_every=3) as sync:
        files = [sync.sync(model(step), step=step).file for step in range(1, 8)]
        assert [file is not None for file in files] == [False, False, True, False, False, True, False]
        assert files[5].result().manifest.step == 6
    manifests = [Channel.open(root).manifest(version) for version in Channel.open(root).versions()]
    assert [str(manifest.id) for manifest in manifests] == ["e1-v3", "e1-v6"]
    assert [manifest.metadata["sent_by"] for manifest in manifests] == ["fast", "fast"]
    assert not any(map(takes_over, manifests)), "a watcher leaves the engine to the fast path"


def test_a_version_by_files_counts_for_persist_every_and_takes_the_engines_over(root: str) -> None:
    box, fast = Box("a"), Carrier()
    with a_sync(root, [fast, Checkpoint()], [box], persist_every=2) as sync:
        sync.sync(model(1))
        fast.fault = "first bucket"
        assert sync.sync(model(2), metadata={"loss": 0.5}).dirty == ("a",)
        box.finish("e1-v2")  # its watcher
        box.resume()
        assert sync.sync(model(3)).transport == "fast"
    (manifest,) = [Channel.open(root).manifest(version) for version in Channel.open(root).versions()]
    assert takes_over(manifest)
    assert manifest.metadata["loss"] == 0.5


def test_files_that_cannot_be_written_do_not_undo_the_sync(root: str) -> None:
    full = Failing(lambda: StoreFull("no space left"), matching("append", suffix=".safetensors"), times=1)
    box = Box("a")
    with a_sync(HookedStore(open_store(root), full), [Carrier()], [box], persist_every=1) as sync:
        first = sync.sync(model(1))
        with pytest.raises(StoreFull):
            first.file.result()
        second = sync.sync(model(2))
        assert str(second.file.result().version) == "e1-v2"
    assert (str(first.version), box.label, versions(root)) == ("e1-v1", "e1-v2", ["e1-v2"])


def test_checkpoint_waits_until_engines_and_readers_confirm_and_not_longer_than_it_was_told(root: str) -> None:
    box = Box("a")

    def watcher() -> None:
        channel = Channel.open(root)
        while channel.poll() is None:
            pass
        channel.write_receipt("node7", {"state": "serving", "label": "e1-v1"})
        box.finish("e1-v1")

    thread = threading.Thread(target=watcher)
    with a_sync(root, [Checkpoint(wait=60, readers=["node7"])], [box]) as sync:
        thread.start()
        done = sync.sync(model(1))
        thread.join()
        assert (done.confirmed, str(sync.version)) == (("a",), "e1-v1")
    with a_sync(root, [Checkpoint(wait=0.3, readers=["node8"])], [box]) as sync:
        done = sync.sync(model(2))
        assert (done.confirmed, done.behind, sync.version) == ((), {"a": "e1-v1"}, None)


def test_a_number_that_went_another_way_is_not_given_to_files_of_other_content(root: str) -> None:
    with Publisher(root) as publisher:
        reserved = publisher.reserve()
        assert str(publisher.publish(model(1)).version) == "e1-v2"
        assert str(publisher.publish(model(0), number=reserved.number + 2).version) == "e1-v3"
        assert str(publisher.reserve()) == "e1-v4"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"persist_every": 0}, "persist_every"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"transports": []}, "at least one"),
        ({"transports": [Carrier(), Carrier()]}, "each once"),
        ({"engines": [Box("a"), Box("a")]}, "two have one name"),
        ({"engines": Box("a")}, r"engines=Box.*must be a list, such as engines=\[VllmEngine"),
        ({"engines": ["http://127.0.0.1:8000"]}, "'http://127.0.0.1:8000' is not an engine"),
        ({"engines": [Box]}, "Box is a class"),
        ({"transports": Carrier()}, "transports=Carrier.*must be a list, such as"),
        ({"transports": "gloo"}, "transports='gloo': must be a list"),
        ({"transports": ["gloo"]}, "'gloo' is not a transport: give objects, such as"),
        ({"transports": [Carrier]}, "Carrier is a class: give an object of it"),
    ],
)
def test_what_cannot_be_meant_is_refused(root: str, wrong: dict[str, Any], reason: str) -> None:
    from ckptsync.sync import WeightSync

    arguments: dict[str, Any] = {"transports": [Carrier()], "channel": root, **wrong}
    with pytest.raises(InvalidInput, match=reason):
        WeightSync(**arguments)
    assert not os.path.exists(root), "no epoch was claimed"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"step": "7"}, "step='7'"),
        ({"metadata": {"loss": torch.ones(1)}}, "metadata must be JSON"),
        ({"trainer_state": {"f": print}}, "trainer_state 'f'"),
        ({"assets": ["base"]}, r"assets=\['base'\]: must be a folder"),
        ({"assets": 7}, "assets=7: must be a folder"),
        ({"assets": "/nowhere"}, "assets='/nowhere': No such file"),
        ({"assets": Path("/nowhere")}, "assets='/nowhere': No such file"),
        ({"assets": {"model": None}}, "None is no folder's path"),
        ({"assets": {"draft": "/"}}, "no track 'draft', only model"),
    ],
)
@pytest.mark.parametrize("every", [1, 10], ids=["files are due", "they are not"])
def test_what_no_version_could_carry_is_refused_before_an_engine_has_it(
    root: str, wrong: dict[str, Any], reason: str, every: int
) -> None:
    box = Box("a")
    with a_sync(root, [Carrier()], [box], persist_every=every) as sync:
        with pytest.raises(InvalidInput, match=reason):
            sync.sync(model(1), **wrong)
        assert box.status().label == ""
        assert str(sync.sync(model(1), step=1).version) == "e1-v1"


def test_assets_may_be_a_path_as_in_open(root: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    with a_sync(root, [Carrier()], [Box("a")], persist_every=1) as sync:
        manifest = sync.sync(model(1), assets=tmp_path / "base").file.result().manifest
    assert Path(root, manifest.folder, "tokenizer.json").read_text() == "{}"
