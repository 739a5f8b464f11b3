"""The plugin in a real SGLang server of two ranks: what is loaded is proven, and nothing that goes wrong ends it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import httpx
import pytest

from ckptsync.engine import StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused
from tests.engines.conftest import Server, aborted_at, left_serving, load
from tests.live.versions import (
    Versions,
    shards,
    with_a_wrong_shape,
    with_one_more,
    without_a_layer,
    without_q_proj,
)
from tests.watcher.publish_folder import publish_folder
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.sglang_transfer import SglangTransferEngine
from watchers.watcher import Watcher

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

UP_PROJ = "model.layers.1.mlp.up_proj.weight"


class Held(NamedTuple):
    """What a server holds, by what it answers and by its own account."""

    tokens: list[list[int]]
    checksum: str


Stock = dict[str, Held]


@pytest.fixture
def engine(server: Server) -> Iterator[SglangTransferEngine]:
    with left_serving(SglangTransferEngine(server.url)) as engine:
        yield engine


@pytest.fixture(scope="module")
def stock(server: Server, versions: Versions) -> Stock:
    """What the server holds after SGLang's own update from disk to each version; `a` is also what it was started on."""
    fresh, found = held(server), {}
    with closing(SglangEngine(server.url)) as engine:
        for name in ("b", "c", "a"):
            load(engine, versions[name])
            found[name] = held(server)
    assert found["a"] == fresh
    assert len({each.checksum for each in found.values()}) == 3
    return found


def held(server: Server) -> Held:
    return Held(server.tokens(), checksum(server))


def checksum(server: Server) -> str:
    body = httpx.post(server.url + "/weights_checker", json={"action": "checksum"}, timeout=60).json()
    assert len(body["ranks"]) == 2
    return str(body["per_engine_checksum"])


def said(engine: SglangTransferEngine) -> list[tuple[Any, ...]]:
    return [(receipt.rank, receipt.state, receipt.path, receipt.proof) for receipt in engine.receipts]


def test_every_rank_loads_by_the_plan_and_holds_what_the_engines_own_update_would(
    engine: SglangTransferEngine, server: Server, versions: Versions, stock: Stock
) -> None:
    for name in ("b", "c", "a", "b"):
        confirmation = load(engine, versions[name])
        assert (confirmation.label, engine.status().label) == (versions[name].label,) * 2
        assert {proof for *_, proof in said(engine)} == {"elements"}
        assert held(server) == stock[name]
    assert said(engine) == [(rank, "loaded", "plan", "elements") for rank in (0, 1)]


def test_ranks_listen_for_what_is_to_be_prepared_while_requests_run(
    engine: SglangTransferEngine, server: Server, versions: Versions
) -> None:
    load(engine, versions["b"])
    with server.running_request() as lines:
        assert engine.prepare(versions["c"])
        assert aborted_at(versions["b"].label, lines, server)["num_retractions"] == 0


def test_a_request_in_flight_across_an_update_tells_both_versions(
    engine: SglangTransferEngine, server: Server, versions: Versions
) -> None:
    load(engine, versions["a"])
    with server.running_request() as lines:
        load(engine, versions["b"])
        meta = aborted_at(versions["b"].label, lines, server)
    assert [span["version"] for span in meta["weight_versions"]] == [versions[name].label for name in "ab"]


def test_frozen_in_place_a_request_goes_on_with_its_old_cache_and_tells_both_versions(
    server: Server, versions: Versions
) -> None:
    options = SglangOptions(pause_mode="in_place", cache="keep")
    with closing(SglangTransferEngine(server.url, options)) as engine:
        load(engine, versions["a"])
        with server.running_request() as lines:
            assert "caches kept" in load(engine, versions["c"]).warnings[-1]
            meta = aborted_at(versions["c"].label, lines, server)
    assert meta["num_retractions"] == 0
    assert [span["version"] for span in meta["weight_versions"]] == [versions[name].label for name in "ac"]
    httpx.post(server.url + "/flush_cache", params={"timeout": 60}, timeout=90).raise_for_status()


# The rows of the fault table of stock SGLang, past every check of the watcher


def refused(engine: SglangTransferEngine, version: StagedVersion) -> str:
    """Why every rank refused it. The engine is resumed after that, as the watcher does."""
    engine.pause()
    engine.start(version)
    with pytest.raises(EngineRefused, match="every rank holds the version before") as raised:
        engine.update(version)
    engine.resume()
    assert {state for _, state, *_ in said(engine)} == {"refused"}
    return str(raised.value)


@pytest.mark.parametrize("change", [without_a_layer, without_q_proj, with_a_wrong_shape, with_one_more])
def test_what_does_not_fit_is_refused_by_every_rank_and_the_server_lives(
    engine: SglangTransferEngine, server: Server, versions: Versions, stock: Stock, broken: Any, change: Any
) -> None:
    load(engine, versions["c"])
    assert "does not fit" in refused(engine, broken(change))
    assert engine.status().label == versions["c"].label
    assert checksum(server) == stock["c"].checksum


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, os.path.getsize(path) - 1)])
def test_a_staged_folder_that_is_not_whole_any_more_is_refused(
    engine: SglangTransferEngine,
    server: Server,
    versions: Versions,
    stock: Stock,
    staged: Any,
    folders: Any,
    damage: Any,
) -> None:
    load(engine, versions["c"])
    version = staged(folders["b"])
    damage(shards(version.folder)[0])
    engine.pause()
    with pytest.raises(EngineRefused, match="is not whole"):
        engine.start(version)
    engine._refuse_unfit = lambda *_: None  # type: ignore[method-assign]
    refused(engine, version)
    assert checksum(server) == stock["c"].checksum


def test_another_manifest_than_was_announced_is_refused(
    engine: SglangTransferEngine, server: Server, versions: Versions, stock: Stock
) -> None:
    load(engine, versions["c"])
    other = StagedVersion(manifest=versions["a"].manifest, folder=versions["b"].folder)
    assert "another version's manifest" in refused(engine, other)
    assert checksum(server) == stock["c"].checksum


# Failures in the middle, in one rank or in both


@pytest.mark.parametrize(("fault", "text"), [("load", UP_PROJ), ("copy", "due"), ("flip", "due")])
def test_a_rank_that_fails_in_the_middle_goes_back_by_itself(
    engine: SglangTransferEngine,
    server: Server,
    versions: Versions,
    stock: Stock,
    faults: Any,
    fault: str,
    text: str,
) -> None:
    """Both ranks: the old version serves on. SGLang's own rollback reads the new folder again, and dies of it."""
    load(engine, versions["b"])
    load(engine, versions["c"])
    if fault == "load":
        plant(faults, "flip", "due", ranks=(0, 1))
        with pytest.raises(EngineRefused):
            attempt(engine, versions["b"])  # a plan that fails its proof is dropped: the next load is the engine's own
    plant(faults, fault, text, ranks=(0, 1))
    with pytest.raises(EngineRefused, match="every rank holds the version before"):
        attempt(engine, versions["b"])
    assert [state for _, state, *_ in said(engine)] == ["restored", "restored"]
    assert engine.status().label == versions["c"].label
    assert checksum(server) == stock["c"].checksum
    load(engine, versions["b"])
    assert checksum(server) == stock["b"].checksum


def plant(faults: Any, what: str, text: str, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        (faults / f"{what}-{rank}").write_text(text)


def attempt(engine: SglangTransferEngine, version: StagedVersion) -> None:
    engine.pause()
    engine.start(version)
    try:
        engine.update(version)
    finally:
        engine.resume()


@pytest.mark.parametrize("fault", ["copy", "silent"])
def test_ranks_that_came_to_differ_are_brought_together_by_the_watcher(
    server: Server, faults: Any, tmp_path: Any, folders: dict[str, str], stock: Stock, fault: str
) -> None:
    """One rank fails, or does not say what it holds: the last good version is loaded again before it serves."""
    root = str(tmp_path / "root")
    with closing(SglangTransferEngine(server.url, SglangOptions(timeout=8))) as engine:
        watcher = Watcher(root, engine, stage=str(tmp_path / "stage"), reader="r")
        for name in "bc":
            publish_folder(root, folders[name])
            assert watcher.step().state == "serving"  # type: ignore[union-attr]
        publish_folder(root, folders["a"])
        plant(faults, fault, "due", ranks=(1,))
        receipt = watcher.step()
        assert receipt is not None
        assert (receipt.state, receipt.label) == ("failed", "e1-v2"), receipt
        assert "rank" in str(receipt.error)
        assert checksum(server) == stock["c"].checksum
        assert (watcher.health.ready, watcher.health.version) == (True, "e1-v2")
        watcher.load_version("3")
        assert checksum(server) == stock["a"].checksum
        watcher.close()


def test_a_rank_that_goes_back_to_another_version_than_was_served_is_dirty(
    engine: SglangTransferEngine, server: Server, versions: Versions, stock: Stock, faults: Any
) -> None:
    """Somebody loaded `c` from disk since the plugin's last update, `b`: that is what it goes back to."""
    load(engine, versions["b"])
    with closing(SglangEngine(server.url)) as other:
        load(other, versions["c"])
    plant(faults, "copy", "due", ranks=(0, 1))
    with pytest.raises(EngineDirty, match="went back to e1-v2, and had served e1-v3"):
        attempt(engine, versions["a"])
    load(engine, versions["a"])
    assert checksum(server) == stock["a"].checksum


def test_a_call_that_is_not_ours_is_survived_and_changes_nothing(
    engine: SglangTransferEngine, server: Server, versions: Versions, stock: Stock
) -> None:
    from watchers.sglang_plugin import announcement

    load(engine, versions["c"])
    words = announcement.Announcement(
        folder="/x", manifest_digest="", label="", receipts="/nowhere", serves="", mailbox=""
    )
    engine.pause()
    for path, body in (
        ("/begin_weight_update", {"selector": "target"}),
        (
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [announcement.encode(words)] * 2,
                "load_format": announcement.LOADER,
                "flush_cache": False,
            },
        ),
        ("/end_weight_update", {}),
    ):
        httpx.post(server.url + path, json=body, timeout=60).raise_for_status()
    engine.resume()
    assert checksum(server) == stock["c"].checksum
