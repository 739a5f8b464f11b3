"""What the adapter of SGLang with the plugin makes of ranks that refuse, differ, or say nothing."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptsync.engine import StagedVersion
from ckptsync.errors import EngineDirty, EngineError, EngineRefused
from watchers.engines.sglang import SglangOptions
from watchers.engines.sglang_transfer import SglangTransferEngine
from watchers.live.mailbox import PREFIX, listen
from watchers.live.receipts import RankReceipt, write_begun, write_ready, write_receipt
from watchers.sglang_plugin.announcement import LOADER, Announcement, decode

from .conftest import load, staged
from .fakes import Answer, FakeSglang

UPDATE = "POST /update_weights_from_tensor"


class FakePlugin(FakeSglang):
    """An SGLang of two ranks that has the plugin. `states` is what each rank comes to; None for a rank that dies of
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments |= {"tp_size": 2, "custom_weight_loader": [LOADER]}
        self.states: list[Any] = ["loaded", "loaded"]
        self.proof = "elements"
        self.flushed: Answer = (200, {"success": True, "message": "Success"})
        self.announced: list[Announcement] = []

    def answer(self, call: str, body: dict[str, Any]) -> Answer:
        if call != UPDATE:
            return super().answer(call, body)
        assert self.session
        assert self.paused
        for rank, state in enumerate(self.states):
            self.work(rank, state, decode(pickle.loads(base64.b64decode(body["serialized_named_tensors"][rank]))))
        return self.flushed

    def work(self, rank: int, state: Any, announcement: Announcement) -> None:
        self.announced.append(announcement)
        if state == "unreachable":
            return
        write_begun(announcement.receipts, rank)
        if state is not None:
            error = "" if state == "loaded" else "planted"
            write_receipt(
                announcement.receipts,
                RankReceipt(
                    rank=rank, label=announcement.label, manifest_digest=announcement.manifest_digest, state=state,
                    path="plan", proof=self.proof, error=error,
                ),
            )  # fmt: skip


@pytest.fixture
def fake() -> FakePlugin:
    return FakePlugin()


@pytest.fixture
def engine(fake: FakePlugin) -> Iterator[SglangTransferEngine]:
    engine = SglangTransferEngine("http://engine:30000", SglangOptions(timeout=1), transport=fake.transport)
    yield engine
    engine.close()


@pytest.fixture
def version(tmp_path: Any) -> StagedVersion:
    (tmp_path / "v7").mkdir()
    return staged(str(tmp_path / "v7"), 7)


def test_the_label_is_set_after_every_rank_has_answered_and_the_cache_was_flushed(
    engine: SglangTransferEngine, fake: FakePlugin, version: StagedVersion
) -> None:
    confirmation = load(engine, version)
    assert confirmation.label == version.label
    assert confirmation.warnings == ("rank 0, 1: loaded by the copy plan, each element was read back",)
    assert [call for call in fake.seen if call.startswith("POST")] == [
        "POST /pause_generation",
        "POST /begin_weight_update",
        UPDATE,
        "POST /end_weight_update",
        "POST /update_weight_version",
        "POST /continue_generation",
    ]
    body = fake.body_of(UPDATE)
    assert (body["load_format"], body["flush_cache"], body.get("weight_version")) == (LOADER, True, None)
    assert {(a.folder, a.label) for a in fake.announced} == {(version.folder, version.label)}
    assert sorted(name for name in os.listdir(os.path.dirname(version.folder)) if not name.startswith(PREFIX)) == ["v7"]


@pytest.mark.parametrize(
    ("states", "error", "text"),
    [
        (["refused", "restored"], EngineRefused, "every rank holds the version before"),
        (["loaded", "refused"], EngineDirty, "rank 1 refused: planted"),
        (["loaded", "dirty"], EngineDirty, "rank 1 dirty: planted"),
        (["loaded", None], EngineDirty, "1 of 2 ranks"),
        (["loaded", "unreachable"], EngineDirty, "1 of 2 ranks"),
        (["unreachable", "unreachable"], EngineRefused, "no rank came as far as"),
    ],
)
def test_ranks_that_do_not_all_hold_the_version_get_no_label_and_the_session_is_closed(
    engine: SglangTransferEngine,
    fake: FakePlugin,
    version: StagedVersion,
    states: list[Any],
    error: type[EngineError],
    text: str,
) -> None:
    fake.states = states
    with pytest.raises(error, match=text):
        load(engine, version)
    assert fake.label == "default"
    assert not fake.session


def test_a_session_that_a_dead_watcher_left_open_is_closed_first(
    engine: SglangTransferEngine, fake: FakePlugin, version: StagedVersion
) -> None:
    fake.session = True
    assert load(engine, version).label == version.label
    assert fake.seen.count("POST /begin_weight_update") == 2


def test_a_session_that_cannot_be_closed_is_dirty(
    engine: SglangTransferEngine, fake: FakePlugin, version: StagedVersion
) -> None:
    fake.answers["POST /end_weight_update"] = (400, {"success": False, "message": "odd"})
    with pytest.raises(EngineDirty, match="end_weight_update"):
        load(engine, version)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"custom_weight_loader": []}, "does not know our loader. Install ckptsync"),
        ({"dp_size": 2}, "data-parallel"),
        ({"speculative_draft_model_path": "/drafts/eagle"}, "draft model /drafts/eagle"),
        ({"weight_cache_mode": "daemon"}, "--weight-cache-mode off"),
    ],
)
def test_a_server_that_would_not_survive_the_load_is_refused_before_the_pause(
    engine: SglangTransferEngine, fake: FakePlugin, version: StagedVersion, arguments: dict[str, Any], text: str
) -> None:
    fake.arguments |= arguments
    with pytest.raises(EngineRefused, match=text):
        engine.prepare(version)
    with pytest.raises(EngineRefused, match=text):
        load(engine, version)
    assert UPDATE not in fake.seen


def test_a_cache_that_could_not_be_flushed_with_the_load_is_flushed_before_the_label_is_set(
    engine: SglangTransferEngine, fake: FakePlugin, version: StagedVersion
) -> None:
    message = "Weights were updated, but the cache was not flushed because requests are still running or queued."
    fake.flushed = 400, {"success": False, "message": message}
    assert load(engine, version).label == version.label
    posts = [call for call in fake.seen if call.startswith("POST")]
    assert posts[4:7] == ["POST /pause_generation", "POST /flush_cache", "POST /update_weight_version"]


def test_caches_are_kept_where_that_was_asked_for(fake: FakePlugin, version: StagedVersion) -> None:
    options = SglangOptions(pause_mode="in_place", cache="keep")
    engine = SglangTransferEngine("http://engine:30000", options, transport=fake.transport)
    assert "caches kept" in load(engine, version).warnings[-1]
    assert fake.body_of(UPDATE)["flush_cache"] is False
    assert "POST /flush_cache" not in fake.seen


def test_values_that_were_not_read_back_are_proven_by_the_engines_own_checksum(
    engine: SglangTransferEngine, fake: FakePlugin, version: StagedVersion
) -> None:
    confirmation = load(engine, version)
    assert (confirmation.fingerprint, confirmation.read_back, engine.read_back()) == ("", True, "values")
    fake.proof = "none"
    confirmation = load(engine, version)
    assert (confirmation.fingerprint, confirmation.read_back, engine.read_back()) == ("abc", False, "checksum")
    fake.proof = "elements"
    assert load(engine, version).fingerprint == "abc", "fingerprints of one engine are compared with each other"
    fake.restart()
    assert load(engine, version).fingerprint == ""


def test_ranks_get_ready_while_the_engine_serves_once_they_listen(
    engine: SglangTransferEngine, fake: FakePlugin, version: StagedVersion
) -> None:
    assert not engine.prepare(version)
    load(engine, version)
    mailbox = fake.announced[0].mailbox

    def ready(rank: int) -> Callable[[bytes], None]:
        return lambda line: write_ready(json.loads(line)["receipts"], rank)

    for rank in (0, 1):
        listen(mailbox, rank, ready(rank))
    posts = [call for call in fake.seen if call.startswith("POST")]
    assert engine.prepare(version)
    assert [call for call in fake.seen if call.startswith("POST")] == posts
