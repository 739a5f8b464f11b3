"""Models of which a kernel does not compute from the parameters as they were loaded: what is served after updates of a
real vLLM is what it served when it was started on the version."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.live.versions import shards
from tests.vllm_plugin.conftest import Failed, InProcess, Start

import models  # isort: skip - found through overlay

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

Staged = Callable[[str], Any]


def test_packed_experts_of_a_mixture_are_packed_again(start_vllm: Start, staged: Staged, tmp_path: Any) -> None:
    """vLLM 0.32's own reload leaves them unpacked, answers 200, and serves other tokens from then on."""
    base, other = (models.tiny_model(str(tmp_path / name), seed, family="qwen3_moe") for seed, name in enumerate("ab"))
    engine = start_vllm(base)
    assert "packs its experts for the kernel CPU" in back_and_forth(engine, staged(base), staged(other))["why"]
    served, before = engine.tokens(), engine.digest()
    engine.break_load_at(name="model.layers.1.mlp.experts.2.up_proj.weight")
    assert engine.to(staged(other))["state"] == "restored"
    assert (engine.tokens(), engine.digest()) == (served, before)


def test_experts_that_are_computed_from_as_loaded_are_copied_by_the_plan(
    start_vllm: Start, staged: Staged, tmp_path: Any
) -> None:
    """Every expert goes into its slice of the two parameters of its layer."""
    base, other = (models.tiny_model(str(tmp_path / name), seed, family="qwen3_moe") for seed, name in enumerate("ab"))
    engine = start_vllm(base, plain_experts=True)
    served = engine.tokens()
    for folder, path in ((other, "reload"), (base, "plan")):
        outcome = engine.to(staged(folder))
        assert (outcome["state"], outcome["path"], outcome["proof"]) == ("loaded", path, "elements"), outcome
    assert engine.tokens() == served
    assert engine.plan()["unread"] == []


def test_an_int8_checkpoint_is_loaded_by_the_engine_and_its_kernels_outlive_that(
    start_vllm: Start, staged: Staged, folders: dict[str, str], tmp_path: Any
) -> None:
    """compressed-tensors W8A8. After vLLM 0.32's own reload on a CPU they read scales that were freed."""
    base, other = (to_int8(folders[name], str(tmp_path / name)) for name in "ab")
    outcome = back_and_forth(start_vllm(base, packed=True), staged(base), staged(other))
    assert outcome["path"] == "reload"
    assert outcome["why"].startswith("no plan: model.")


def test_a_draft_model_with_weights_of_its_own_is_refused_by_name(
    start_vllm: Start, versions: Any, folders: dict[str, str], fresh_tokens: Any
) -> None:
    drafts = {"method": "draft_model", "model": folders["c"], "num_speculative_tokens": 2}
    engine = start_vllm(folders["a"], speculative_config=drafts)
    version, refusal = versions["b"], f"the draft model {folders['c']} would keep its old weights"
    with pytest.raises(Failed, match=refusal):  # before the pause
        engine.prepare(folder=version.folder, manifest_digest=version.manifest.manifest_digest)
    outcome = engine.to(version)
    assert (outcome["state"], outcome["kind"]) == ("refused", "engine-refused")
    assert refusal in outcome["error"]
    assert engine.tokens() == fresh_tokens("a")


def back_and_forth(engine: InProcess, base: Any, other: Any) -> dict[str, Any]:
    """Through three updates: each leaves what a start on that version serves."""
    served: dict[str, Any] = {base.label: engine.tokens()}
    for version in (other, base, other):
        outcome = engine.to(version)
        assert (outcome["state"], outcome["path"], outcome["proof"]) == ("loaded", "reload", "none"), outcome
        assert engine.tokens() == served.setdefault(version.label, engine.tokens())
    assert served[base.label] != served[other.label]
    return outcome


def to_int8(folder: str, target: str) -> str:
    """The same checkpoint with linear layers in int8, a scale for each row, and activations quantized as they come."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].float().abs().amax(1, keepdim=True) / 127
        tensors[name.removesuffix("weight") + "weight_scale"] = scale.to(torch.bfloat16)
        tensors[name] = (tensors[name].float() / scale).round().to(torch.int8)
    save_file(tensors, os.path.join(target, "model.safetensors"), metadata={"format": "pt"})
    models.write_index(target)
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**int8, "strategy": "channel", "dynamic": False},
        "input_activations": {**int8, "strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    with open(os.path.join(target, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    with open(os.path.join(target, "config.json"), "w", encoding="utf-8") as file:
        json.dump({**config, "quantization_config": quantization}, file)
    return target
