"""The SGLang adapter against a real SGLang server with a tiny random model."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from ckptsync.engine import Engine, StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused, ProofFailed
from tests.waiting import until
from tests.watcher.publish_folder import publish_folder
from watchers.engines.embedded import EmbeddedEngine
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.sglang_transfer import SglangTransferEngine
from watchers.engines.vllm import VllmEngine
from watchers.watcher import Watcher

from .conftest import Server, Started, aborted_at, left_serving, load, staged

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]

Versions = dict[str, StagedVersion]


@pytest.fixture
def engine(sglang_server: Server) -> Iterator[SglangEngine]:
    with left_serving(SglangEngine(sglang_server.url)) as engine:
        yield engine


def test_a_loaded_version_gives_the_tokens_of_a_fresh_server(
    engine: SglangEngine, sglang_server: Server, versions: Versions, started_on_b: Callable[[str], Started]
) -> None:
    a, b = versions["a"], versions["b"]
    first = load(engine, a)
    of_a = sglang_server.tokens()
    second = load(engine, b)
    assert second.label == b.label == engine.status().label
    of_b = sglang_server.tokens()
    assert load(engine, a).fingerprint == first.fingerprint != second.fingerprint
    assert sglang_server.tokens() == of_a != of_b

    fresh, of_fresh = started_on_b("sglang")
    assert of_fresh == of_b
    assert checksum(fresh, key="secret") == second.fingerprint
    with closing(SglangEngine(fresh.url)) as stranger, pytest.raises(EngineRefused, match=r"401.*admin_key"):
        stranger.pause()
    with left_serving(SglangEngine(fresh.url, SglangOptions(admin_key="secret"))) as other:
        assert load(other, a).fingerprint == first.fingerprint
        assert fresh.tokens() == of_a


def checksum(server: Server, key: str = "") -> str:
    """What `/weights_checker` says of all weights of a server."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.post(server.url + "/weights_checker", json={"action": "checksum"}, headers=headers, timeout=60)
    return str(answer.json()["per_engine_checksum"])


def test_the_boot_identity_outlives_a_load_and_a_pause(engine: SglangEngine, versions: Versions) -> None:
    before = engine.status().boot_id
    load(engine, versions["a"])
    engine.pause()
    assert engine.status().boot_id == before != ""
    engine.resume()


def test_the_schema_is_that_of_the_start_also_for_a_watcher_that_comes_later(
    engine: SglangEngine, sglang_server: Server, versions: Versions
) -> None:
    load(engine, versions["b"])
    assert httpx.get(sglang_server.url + "/model_info", timeout=60).json()["model_path"] == versions["b"].folder
    with closing(SglangEngine(sglang_server.url)) as other:
        schema = other.schema()
        assert schema == {t.name: t.spec for t in versions["a"].manifest.tracks["model"].tensors}
        assert other.schema() is schema


def test_pause_and_resume_may_be_repeated(engine: SglangEngine) -> None:
    for _ in range(2):
        engine.pause()
        assert engine.status().paused
    for _ in range(2):
        engine.resume()
        assert not engine.status().paused


def test_a_running_request_is_recomputed_over_a_load(
    engine: SglangEngine, sglang_server: Server, versions: Versions
) -> None:
    load(engine, versions["a"])
    with sglang_server.running_request() as lines:
        assert load(engine, versions["b"]).warnings == ()
        meta = aborted_at("e1-v2", lines, sglang_server)
    assert [span["version"] for span in meta["weight_versions"]] == ["e1-v1", "e1-v2"]


def test_case_100_weights_updated_but_not_flushed_is_made_up_for(
    engine: SglangEngine, sglang_server: Server, versions: Versions
) -> None:
    """The 400 that SGLang answers when a request is still running: the weights are in, label and flush are
    not."""
    a, b = versions["a"], versions["b"]
    load(engine, b)
    of_b = sglang_server.tokens()
    load(engine, a)
    with sglang_server.running_request() as lines:
        httpx.post(sglang_server.url + "/pause_generation", json={"mode": "in_place"}, timeout=60).raise_for_status()
        engine.start(b)
        engine.update(b)
        assert engine.status().label == a.label, "if it is b already, there was no 400 and this test proves nothing"
        engine.finish(b)
        confirmation = engine.confirm(b)
        engine.resume()
        aborted_at(b.label, lines, sglang_server)
    assert "flushed in a second step" in confirmation.warnings[0]
    assert sglang_server.tokens() == of_b


def test_in_place_keeps_requests_and_caches_and_says_so_and_a_kept_request_names_both_versions(
    sglang_server: Server, versions: Versions
) -> None:
    options = SglangOptions(pause_mode="in_place", cache="keep")
    with closing(SglangEngine(sglang_server.url, options)) as engine:
        load(engine, versions["a"])
        with sglang_server.running_request() as lines:
            confirmation = load(engine, versions["b"])
            meta = aborted_at("e1-v2", lines, sglang_server)
    assert "caches kept" in confirmation.warnings[0]
    assert meta["num_retractions"] == 0
    old, new = meta["weight_versions"]
    assert (old["version"], new["version"]) == ("e1-v1", "e1-v2")
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], meta["completion_tokens"]), "each is of one"
    httpx.post(sglang_server.url + "/flush_cache", params={"timeout": 60}, timeout=90).raise_for_status()


def test_a_path_that_is_not_there_is_refused_and_the_old_version_serves_on(
    engine: SglangEngine, sglang_server: Server, versions: Versions
) -> None:
    load(engine, versions["a"])
    of_a = sglang_server.tokens()
    nowhere = staged("/nowhere/at/all", 9)
    engine.pause()
    engine.start(nowhere)
    with pytest.raises(EngineRefused, match=r"load: POST http.* loaded nothing: .*/nowhere/at/all readable"):
        engine.update(nowhere)
    engine.resume()
    assert engine.status().label == versions["a"].label
    assert sglang_server.tokens() == of_a


def test_an_engine_that_computes_is_refused(engine: SglangEngine, versions: Versions) -> None:
    with pytest.raises(EngineRefused, match="not paused"):
        engine.start(versions["a"])


def test_a_label_that_is_not_the_version_is_no_proof(engine: SglangEngine, versions: Versions) -> None:
    load(engine, versions["a"])
    with pytest.raises(ProofFailed, match="e1-v1"):
        engine.confirm(versions["b"])


def test_case_97_a_repeated_long_prompt_never_sees_the_old_prefix_unless_caches_are_kept(
    sglang_server: Server, versions: Versions
) -> None:
    """The control of the comparisons above: they would notice a cache that was not flushed."""
    with (
        closing(SglangEngine(sglang_server.url)) as flushing,
        closing(SglangEngine(sglang_server.url, SglangOptions(cache="keep"))) as keeping,
    ):
        load(flushing, versions["b"])
        of_b = sglang_server.tokens()
        load(flushing, versions["a"])
        sglang_server.tokens()
        load(keeping, versions["b"])
        assert sglang_server.tokens() != of_b
        load(flushing, versions["b"])
        assert sglang_server.tokens() == of_b


@pytest.mark.parametrize("adapter", [VllmEngine, EmbeddedEngine])
def test_another_adapter_says_whose_server_this_is(sglang_server: Server, adapter: type[Engine]) -> None:
    with closing(adapter(sglang_server.url)) as wrong, pytest.raises(EngineRefused, match="try --engine sglang"):
        wrong.status()


def test_a_server_without_the_plugin_is_never_sent_a_load_format_that_it_does_not_know(
    sglang_server: Server, versions: Versions
) -> None:
    """It would die of it."""
    with closing(SglangTransferEngine(sglang_server.url)) as engine:
        with pytest.raises(EngineRefused, match="Install ckptsync in the engine's environment"):
            engine.prepare(versions["a"])
        engine.pause()
        with pytest.raises(EngineRefused, match="Install ckptsync in the engine's environment"):
            engine.start(versions["a"])
        engine.resume()


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, os.path.getsize(path) - 1)])
def test_a_staged_shard_that_went_missing_or_lost_its_end_is_not_sent(
    engine: SglangEngine, versions: Versions, tmp_path: Any, damage: Any
) -> None:
    """Of a truncated one the server dies."""
    folder = str(tmp_path / "copy")
    shutil.copytree(versions["b"].folder, folder)
    version = staged(folder, 2)
    damage(next(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".safetensors")))
    engine.pause()
    with pytest.raises(EngineRefused, match="is not whole"):
        engine.start(version)
    engine.resume()


# The rows of the fault table that stock SGLang loads with "success": planted in the store


def with_zeros_at_the_end(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-512, os.SEEK_END)
        file.write(bytes(512))


def with_a_nan(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\xc0\x7f")


def cut_short(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


@pytest.fixture
def watched(sglang_server: Server, tmp_path: Any, versions: Versions) -> Iterator[Watcher]:
    """A watcher of the server, with version 1 of a channel of its own serving."""
    root = str(tmp_path / "root")
    publish_folder(root, versions["a"].folder)
    with closing(SglangEngine(sglang_server.url)) as engine:
        watcher = Watcher(root, engine, stage=str(tmp_path / "stage"), reader="r", patience=0)
        assert watcher.step().state == "serving"  # type: ignore[union-attr]
        yield watcher
        watcher.close()


@pytest.mark.parametrize("damage", [with_zeros_at_the_end, with_a_nan, cut_short, os.unlink])
@pytest.mark.parametrize("file", ["the last shard", "the index"])
def test_a_version_that_was_damaged_in_the_store_never_reaches_the_server(
    watched: Watcher, sglang_server: Server, tmp_path: Any, versions: Versions, damage: Any, file: str
) -> None:
    before, pauses = checksum(sglang_server), []
    watched.engine.pause = lambda: pauses.append("pause")  # type: ignore[method-assign]
    folder = str(tmp_path / "root" / publish_folder(str(tmp_path / "root"), versions["b"].folder).folder)
    ending = ".safetensors" if file == "the last shard" else ".index.json"
    damage(max(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(ending)))
    for _ in range(3):
        watched.step()
    assert (watched.health.ready, watched.health.version) == (True, "e1-v1")
    assert "e1-v2" in watched.health.reason or "model" in watched.health.reason
    assert (pauses, checksum(sglang_server)) == ([], before)


def test_a_stale_shard_beside_a_version_is_not_loaded(
    watched: Watcher, sglang_server: Server, tmp_path: Any, versions: Versions, engine: SglangEngine
) -> None:
    of_b = load(engine, versions["b"]).fingerprint
    folder = str(tmp_path / "root" / publish_folder(str(tmp_path / "root"), versions["b"].folder).folder)
    stale = next(name for name in os.listdir(versions["a"].folder) if name.endswith(".safetensors"))
    shutil.copy(os.path.join(versions["a"].folder, stale), os.path.join(folder, "model-zzz.safetensors"))
    receipt = watched.load_version("2")
    assert (receipt.state, receipt.fingerprint, checksum(sglang_server)) == ("serving", of_b, of_b)


def unreadable_once(path: str) -> threading.Thread:
    """Whoever opens the file next finds other bytes, and what it was when it is opened again. A lease holds the one who
    opens it until the good file is back under the name (fcntl(2), F_SETLEASE: for 45 s)."""
    good = f"{path}.good"
    os.rename(path, good)
    with open(path, "wb") as file:
        file.write(bytes(os.path.getsize(good)))
    held = os.open(path, os.O_RDONLY)
    fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGURG)  # which is ignored; SIGIO would end this process
    fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def let_in() -> None:
        until(lambda: fcntl.fcntl(held, fcntl.F_GETLEASE) != fcntl.F_WRLCK, 300, "the shard is opened")
        os.replace(good, path)
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(held)

    thread = threading.Thread(target=let_in)
    thread.start()
    return thread


def test_after_a_rollback_by_the_server_which_reads_the_new_folder_again_the_last_good_version_is_loaded(
    watched: Watcher, sglang_server: Server, tmp_path: Any, versions: Versions, engine: SglangEngine
) -> None:
    of_b = load(engine, versions["b"]).fingerprint
    of_a = load(engine, versions["a"]).fingerprint
    update, after = watched.engine.update, []

    def update_once(version: StagedVersion) -> None:
        watched.engine.update = update  # type: ignore[method-assign]
        last = max(name for name in os.listdir(version.folder) if name.endswith(".safetensors"))
        thread = unreadable_once(os.path.join(version.folder, last))
        try:
            update(version)
        except EngineDirty as error:
            after.append((str(error), checksum(sglang_server), engine.status().label))
            raise
        finally:
            thread.join()

    watched.engine.update = update_once  # type: ignore[method-assign]
    publish_folder(str(tmp_path / "root"), versions["b"].folder)
    watched.step()
    ((said, held, label),) = after
    assert "Rolling back to original weights" in said
    assert (held, label) == (of_b, "e1-v1"), "it rolled back to the version that it was to leave"
    assert (watched.health.ready, watched.health.version, checksum(sglang_server)) == (True, "e1-v1", of_a)
