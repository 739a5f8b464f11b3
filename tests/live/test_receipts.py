"""What ranks say is judged as a whole: one version everywhere, or an error that says who holds what."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ckptsync.errors import EngineDirty, EngineRefused, InvalidInput, ProofFailed
from ckptsync.manifest import Manifest
from watchers.live.outcome import State
from watchers.live.receipts import (
    RankReceipt,
    await_ready,
    await_receipts,
    judge,
    notes,
    receipt_folder,
    write_ready,
    write_receipt,
)
from watchers.vllm_plugin.endpoint import settings_from

MANIFEST = Manifest(
    channel_id="c", epoch=1, number=2, nonce="n", run_id="r", created=0.0, digest="xxh3-128", content_digest="",
    tracks={}, manifest_digest="d",
)  # fmt: skip


def said(rank: int, state: State, **more: Any) -> RankReceipt:
    return RankReceipt(**{"rank": rank, "label": "e1-v2", "manifest_digest": "d", "state": state, **more})


def test_every_rank_loaded_is_a_load() -> None:
    judge([said(0, "loaded"), said(1, "loaded")], 2, MANIFEST)


@pytest.mark.parametrize("states", [("refused", "refused"), ("restored", "refused"), ("restored", "restored")])
def test_every_rank_on_the_old_version_is_a_refusal(states: tuple[State, State]) -> None:
    with pytest.raises(EngineRefused, match="every rank holds the version before"):
        judge([said(rank, state, error="why") for rank, state in enumerate(states)], 2, MANIFEST)


@pytest.mark.parametrize("other", ["refused", "restored", "dirty"])
def test_ranks_on_different_versions_are_dirty(other: State) -> None:
    with pytest.raises(EngineDirty, match=f"rank 1 {other}: why"):
        judge([said(0, "loaded"), said(1, other, error="why")], 2, MANIFEST)


def test_a_silent_rank_is_dirty() -> None:
    with pytest.raises(EngineDirty, match="1 of 2 ranks"):
        judge([said(0, "loaded")], 2, MANIFEST)


def test_a_receipt_for_another_version_proves_nothing() -> None:
    with pytest.raises(ProofFailed, match="rank 1"):
        judge([said(0, "loaded"), said(1, "loaded", manifest_digest="other")], 2, MANIFEST)


def test_receipts_travel_as_files_that_are_gone_afterwards(tmp_path: Any) -> None:
    staged = tmp_path / "e0001-v00000002-n"
    with receipt_folder(str(staged)) as folder:
        for rank in (1, 0):
            write_receipt(folder, said(rank, "loaded", path="plan", proof="sums"))
        found = await_receipts(folder, 2, 0)
        assert os.stat(folder).st_mode & 0o777 == 0o700
    assert [receipt.rank for receipt in found] == [0, 1]
    assert notes(found) == ("rank 0, 1: loaded by the copy plan, sums of each copy were read back",)
    assert os.listdir(tmp_path) == []


def test_notes_say_what_was_moved() -> None:
    of = {"path": "plan", "proof": "sums"}
    found = [said(0, "loaded", moved=2_000_000, **of), said(1, "loaded", moved=500_000, **of)]
    found.append(said(2, "loaded", why="norm was not what was loaded last, so everything was copied", **of))
    assert notes(found) == (
        "rank 0, 1: loaded by the copy plan (only what changed), sums of each copy were read back; 2.5 MB moved",
        "rank 2: loaded by the copy plan (norm was not what was loaded last, so everything was copied), "
        "sums of each copy were read back",
    )


def test_readiness_of_each_rank_is_waited_for(tmp_path: Any) -> None:
    with receipt_folder(str(tmp_path / "staged")) as folder:
        write_ready(folder, 0)
        assert not await_ready(folder, 2, 0)
        write_ready(folder, 1)
        assert await_ready(folder, 2, 0)
    write_ready(folder, 0)  # nobody waits any more, and that is no error


def test_settings_come_from_the_environment() -> None:
    assert settings_from({}) is None
    found = settings_from({"CKPTSYNC_ROOT": "/r", "CKPTSYNC_POLL": "0.5", "CKPTSYNC_PAUSE_MODE": "wait"})
    assert found is not None
    assert (found.root, found.poll, found.pause_mode, found.cache) == ("/r", 0.5, "wait", "flush")


@pytest.mark.parametrize("wrong", [{"POLL": "often"}, {"POLL": "0"}, {"PAUSE_MODE": "stop"}, {"CACHE": "drop"}])
def test_settings_that_are_none_are_refused_by_name(wrong: dict[str, str]) -> None:
    environ = {"CKPTSYNC_ROOT": "/r", **{f"CKPTSYNC_{key}": value for key, value in wrong.items()}}
    with pytest.raises(InvalidInput, match=f"CKPTSYNC_{next(iter(wrong))}"):
        settings_from(environ)
