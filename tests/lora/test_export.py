"""Adapters out of PEFT models: a directory that PEFT loads back to the bit, and a merge that rounds once."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from ckptsync.channel import Channel
from ckptsync.errors import InvalidInput, UnsupportedTensor
from ckptsync.export.lora import MergedSource, export_adapter
from ckptsync.manifest import Manifest, TensorSpec
from ckptsync.publish import Publisher
from ckptsync.resuming import resume
from ckptsync.shards.tensors import load_tensors
from ckptsync.store import open_store
from ckptsync.testing.hooks import HookedStore, Recorder
from ckptsync.verify import verify_version
from tests.lora.models import TinyLM, randomise, with_adapter
from tests.trainer.models import same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

TOKENS = torch.arange(8)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "root")


def tiny(seed: int = 1, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    return with_adapter(TinyLM().to(dtype), seed, task_type=None, **config)


def stored(root: str, manifest: Manifest) -> dict[str, torch.Tensor]:
    return dict(load_tensors(os.path.join(root, manifest.folder), manifest.tracks["model"], verify=True))


def peft_own(model: nn.Module, adapter: str = "default") -> Mapping[str, torch.Tensor]:
    return {
        name: tensor.detach() for name, tensor in peft.get_peft_model_state_dict(model, adapter_name=adapter).items()
    }


# -- as a PEFT directory -------------------------------------------------------------------------------------


def test_the_directory_is_the_one_that_peft_itself_would_write_and_loads_back_to_the_bit(root: str) -> None:
    model = tiny()
    with Publisher(root) as publisher:
        manifest = publisher.publish(model, kind="adapter", step=3).manifest
    assert (manifest.kind, manifest.step) == ("adapter", 3)
    folder = os.path.join(root, manifest.folder)
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors", "ckptsync.json"]
    found = stored(root, manifest)
    same(found, dict(peft_own(model)))
    assert "base_model.model.layers.0.q_proj.lora_A.weight" in found
    assert verify_version(Channel.open(root), manifest.id).ok

    again = peft.PeftModel.from_pretrained(TinyLM(), folder)
    assert torch.equal(again(TOKENS), model(TOKENS))
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj", "v_proj"])


def test_wrappers_do_not_show_in_the_names(root: str) -> None:
    model = tiny()
    with Publisher(root) as publisher:
        manifest = publisher.publish(torch.compile(model, backend="eager"), kind="adapter").manifest
    same(stored(root, manifest), dict(peft_own(model)))


def test_another_adapter_is_published_by_its_name_and_one_that_is_not_there_is_refused(root: str) -> None:
    model = tiny()
    model.add_adapter("ema", peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    randomise(model, 7, "ema")
    with Publisher(root) as publisher:
        manifest = publisher.publish(model, kind="adapter", adapter="ema").manifest
        with pytest.raises(InvalidInput, match=r"no LoRA adapter 'old' \(it has default, ema\)"):
            publisher.publish(model, kind="adapter", adapter="old")
        with pytest.raises(InvalidInput, match="it has none at all"):
            publisher.publish(TinyLM(), kind="adapter")
    same(stored(root, manifest), dict(peft_own(model, "ema")))


def test_rank_stabilised_scaling_is_written_so_that_alpha_over_r_is_right(root: str) -> None:
    """SGLang computes alpha / r whatever use_rslora says."""
    model = tiny(use_rslora=True)
    export = export_adapter(model)
    config = json.loads(export.config)
    assert config["lora_alpha"] / config["r"] == pytest.approx(8 / 4**0.5)
    assert config["use_rslora"] is False


def test_targets_are_whole_names_where_other_layers_end_alike() -> None:
    model = tiny(target_modules=r".*layers\.1\.q_proj")
    assert json.loads(export_adapter(model).config)["target_modules"] == ["layers.1.q_proj"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"modules_to_save": ["head"]}, r"head.*modules_to_save.*merge_lora=True"),
        ({"use_dora": True}, r"q_proj' is DoRA"),
        ({"lora_bias": True}, r"q_proj' has a LoRA bias"),
        ({"bias": "lora_only"}, r"trains biases"),
        ({"rank_pattern": {"v_proj": 2}}, r"LoRA rank of .*v_proj' is 2"),
        ({"alpha_pattern": {"v_proj": 2}}, r"LoRA scaling of .*v_proj'"),
        ({"init_lora_weights": "pissa"}, r"'pissa' changes the base model"),
    ],
)
def test_what_an_engine_would_take_for_something_else_is_refused_by_name(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedTensor, match=says):
        export_adapter(tiny(**config))


def test_only_what_goes_together_is_accepted(root: str) -> None:
    with Publisher(root) as publisher:
        with pytest.raises(InvalidInput, match="use kind='full'"):
            publisher.publish(tiny(), kind="adapter", merge_lora=True)
        with pytest.raises(InvalidInput, match="taken from a module"):
            publisher.publish({"a": torch.ones(1)}, kind="adapter")
        with pytest.raises(InvalidInput, match="kind='delta'"):
            publisher.publish(tiny(), kind="delta")


@pytest.mark.parametrize("given", [lambda m: m, lambda m: m.state_dict(), lambda m: iter(m.state_dict().items())])
def test_a_peft_model_that_is_published_as_if_it_were_a_full_one_is_refused_with_the_ways(
    given: Callable[[Any], Any], root: str
) -> None:
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder)) as publisher:
        recorder.seen.clear()
        with pytest.raises(InvalidInput, match=r"'base_model\..*' is a part of .*kind='adapter'.*merge_lora=True"):
            publisher.publish(
                given(with_adapter(nn.Sequential(nn.Linear(2, 2)), 1, task_type=None, target_modules=["0"]))
            )
        assert recorder.changes() == []


def test_names_of_peft_are_published_where_rules_or_a_source_say_that_they_are_meant(root: str) -> None:
    """vLLM with LoRA has such names, and so has a checkpoint of Phi-4-multimodal, with its adapters inside."""
    state = {"q_proj.base_layer.weight": torch.ones(2), "q_proj.lora_A.speech.weight": torch.ones(2)}

    class Source:
        def metadata(self) -> list[TensorSpec]:
            return [TensorSpec(name, "F32", (2,)) for name in state]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(state.items())

    with Publisher(root) as publisher:
        same(stored(root, publisher.publish(Source()).manifest), state)
    with Publisher(root, remap={"*.base_layer.weight": "*.weight"}, remove=["*.lora_A.speech.weight"]) as publisher:
        assert list(stored(root, publisher.publish(state).manifest)) == ["q_proj.weight"]
    with Publisher(root, remap={"*.weight": "*.base_layer.weight"}) as publisher:
        done = publisher.publish({"q_proj.weight": torch.ones(2)})
    assert list(stored(root, done.manifest)) == ["q_proj.base_layer.weight"]


def test_a_model_is_not_resumed_from_an_adapter_and_the_remedy_is_said(root: str) -> None:
    with Publisher(root) as publisher:
        done = publisher.publish(tiny(), kind="adapter")
    with pytest.raises(InvalidInput, match=r"e1-v1 is an adapter version, .*merge_lora=True"):
        resume(root, TinyLM(), version=done.version.label)


# -- folded in -----------------------------------------------------------------------------------------------


def peft_merged(model: Any) -> dict[str, torch.Tensor]:
    """What PEFT's own merge gives; the model given is left alone."""
    merged = copy.deepcopy(model).merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in merged.state_dict().items() if name != "head.weight"}


def merged(root: str, model: nn.Module, **config: Any) -> dict[str, torch.Tensor]:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Publisher(root, **config) as publisher:
        manifest = publisher.publish(model, merge_lora=True).manifest
    assert manifest.kind == "full"
    same(model.state_dict(), before)
    return stored(root, manifest)


def test_in_float32_the_merge_is_that_of_peft_to_the_bit(root: str) -> None:
    model = tiny()
    same(merged(root, model), peft_merged(model))


def test_from_float32_to_bfloat16_it_is_rounded_once(root: str) -> None:
    model = tiny()
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in peft_merged(model).items()}
    same(merged(root, model, dtype=torch.bfloat16), expected)


def test_bfloat16_weights_are_folded_in_float32(root: str) -> None:
    """For bfloat16 adapters PEFT rounds the product and then the sum: further from the truth in some elements."""
    model = with_adapter(TinyLM(width=64), 1, task_type=None).to(torch.bfloat16)
    wide = copy.deepcopy(model).to(torch.float32)
    truth = peft_merged(wide)
    found = merged(root, model)
    same(found, {name: tensor.to(torch.bfloat16) for name, tensor in truth.items()})
    twice = peft_merged(model)
    name = "layers.0.q_proj.weight"
    assert not torch.equal(found[name], twice[name]), "else this test proves nothing"
    assert (found[name].float() - truth[name]).abs().max() <= (twice[name].float() - truth[name]).abs().max()


def test_embeddings_other_adapters_and_trained_modules_fold_as_peft_folds_them(root: str) -> None:
    # PEFT gives a trained head a weight of its own, so nothing is tied here.
    base = TinyLM()
    base.head.weight = nn.Parameter(base.head.weight.detach().clone())
    model = with_adapter(base, 3, task_type=None, target_modules=["q_proj", "embed"], modules_to_save=["head"])
    with torch.no_grad():
        model.base_model.model.head.modules_to_save["default"].weight.normal_()
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    same(merged(root, model), {name: tensor.detach() for name, tensor in expected.items()})


def test_a_model_that_is_merged_already_and_a_convolution_are_refused_by_name(root: str) -> None:
    model = tiny()
    model.merge_adapter()
    with pytest.raises(InvalidInput, match=r"layers.0.q_proj' is merged already"):
        MergedSource(model)
    net = nn.Sequential(nn.Conv2d(2, 2, 1))
    with pytest.raises(UnsupportedTensor, match=r"LoRA layer .*0': an adapter can be folded into a two-dim"):
        MergedSource(with_adapter(net, 1, task_type=None, target_modules=["0"]))
