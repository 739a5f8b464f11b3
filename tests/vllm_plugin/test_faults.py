"""The rows of the fault table of stock vLLM, planted under the plugin: the old version serves on, exactly."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ckptsync.engine import StagedVersion
from tests.live.versions import (
    Q_PROJ,
    Versions,
    with_a_wrong_shape,
    with_one_more,
    without_a_layer,
    without_q_proj,
)
from tests.vllm_plugin.conftest import InProcess

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("first", [True, False], ids=["by reload", "by plan"])
@pytest.mark.parametrize("change", [without_a_layer, without_q_proj, with_a_wrong_shape, with_one_more])
def test_what_does_not_fit_is_refused_before_the_model_is_touched(
    engine: InProcess, versions: Versions, broken: Any, fresh_tokens: Any, change: Any, first: bool
) -> None:
    engine.to(versions["c"])
    if first:
        engine.forget_plan()
    before = engine.digest()
    outcome = engine.to(broken(change))
    assert (outcome["state"], outcome["kind"]) == ("refused", "schema-mismatch"), outcome
    assert engine.digest() == before
    assert engine.label() == versions["c"].label
    assert engine.tokens() == fresh_tokens("c")
    assert engine.to(versions["b"])["state"] == "loaded"
    assert engine.tokens() == fresh_tokens("b")


def test_a_torn_file_is_refused(engine: InProcess, versions: Versions, staged: Any, folders: Any) -> None:
    engine.to(versions["c"])
    before, version = engine.digest(), staged(folders["b"])
    shard = next(
        os.path.join(version.folder, f.name)
        for f in version.manifest.tracks["model"].files
        if f.name.endswith(".safetensors")
    )
    os.truncate(shard, os.path.getsize(shard) - 1)
    outcome = engine.to(version)
    assert (outcome["state"], outcome["kind"]) == ("refused", "bad-shard"), outcome
    assert engine.digest() == before


def test_another_manifest_than_announced_is_refused(engine: InProcess, versions: Versions) -> None:
    engine.to(versions["c"])
    other = StagedVersion(manifest=versions["a"].manifest, folder=versions["b"].folder)
    assert engine.to(other)["kind"] == "bad-manifest"
    gone = StagedVersion(manifest=versions["a"].manifest, folder=versions["b"].folder + "-gone")
    assert engine.to(gone)["kind"] == "engine-refused"


@pytest.mark.parametrize("where", ["model.layers.1.mlp.up_proj.weight", Q_PROJ, "lm_head.weight"])
def test_a_failure_in_the_middle_of_the_engines_own_load_is_rolled_back(
    engine: InProcess, versions: Versions, fresh_tokens: Any, where: str
) -> None:
    """Stock: the process dies at the next request."""
    engine.to(versions["c"])
    engine.forget_plan()
    before = engine.digest()
    engine.break_load_at(name=where)
    outcome = engine.to(versions["b"])
    assert (outcome["state"], outcome["path"]) == ("restored", "reload"), outcome
    assert "planted at" in outcome["error"]
    assert engine.digest() == before
    assert engine.tokens() == fresh_tokens("c")
    assert engine.to(versions["b"])["state"] == "loaded"
    assert engine.tokens() == fresh_tokens("b")


def test_a_wrong_shape_in_the_loader_does_not_poison_later_reloads(
    engine: InProcess, versions: Versions, fresh_tokens: Any
) -> None:
    """Stock: the bad tensor stays buffered, and every later good reload raises the same error."""
    engine.to(versions["c"])
    engine.forget_plan()
    before = engine.digest()
    engine.break_load_at(name="model.layers.1.self_attn.k_proj.weight", shape=True)
    assert engine.to(versions["b"])["state"] == "restored"
    assert engine.digest() == before
    assert engine.to(versions["b"])["state"] == "loaded"
    assert engine.tokens() == fresh_tokens("b")


def test_a_failure_in_the_middle_of_the_copies_is_rolled_back(
    engine: InProcess, versions: Versions, fresh_tokens: Any
) -> None:
    engine.to(versions["b"])
    engine.to(versions["c"])
    before = engine.digest()
    engine.break_load_at(name="")
    outcome = engine.to(versions["b"])
    assert (outcome["state"], outcome["proof"]) == ("restored", "elements"), outcome
    assert engine.digest() == before
    assert engine.tokens() == fresh_tokens("c")
    assert engine.to(versions["b"])["path"] == "plan"


def test_one_wrong_bit_fails_the_proof_and_is_rolled_back(
    engine: InProcess, versions: Versions, fresh_tokens: Any
) -> None:
    engine.to(versions["b"])
    engine.to(versions["c"])
    before = engine.digest()
    engine.flip_after_copy()
    outcome = engine.to(versions["b"])
    assert (outcome["state"], outcome["kind"]) == ("restored", "proof-failed"), outcome
    assert "model.norm.weight" in outcome["error"]
    assert engine.digest() == before
    assert engine.tokens() == fresh_tokens("c")
    after = engine.to(versions["b"])  # a plan that failed once is learned anew
    assert (after["state"], after["path"], after["proof"]) == ("loaded", "reload", "elements")
    assert engine.tokens() == fresh_tokens("b")


def test_a_failure_of_the_first_update_goes_back_to_what_the_engine_was_started_with(
    start_vllm: Any, folders: Any, versions: Versions, fresh_tokens: Any
) -> None:
    engine = start_vllm(folders["a"])
    before = engine.digest()
    engine.break_load_at(name="model.layers.1.mlp.up_proj.weight")
    outcome = engine.to(versions["b"])
    assert outcome["state"] == "restored"
    assert engine.digest() == before
    assert engine.label() == "default"
    assert engine.tokens() == fresh_tokens("a")
