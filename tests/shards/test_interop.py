"""Both ways between our files and those of safetensors and transformers."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptsync.safetensors_format import DTYPE_BITS
from ckptsync.shards.index import INDEX_NAME, index_bytes
from ckptsync.shards.plan import plan_shards
from ckptsync.shards.read import read_header
from ckptsync.shards.tensors import TORCH_DTYPES, checkpoint_tensors, load_tensors, spec_of, tensor_bytes
from ckptsync.testing.strategies import state_dicts

from .files import write_plan, write_track
from .test_tensors import same, values

# From files only: safetensors' load(bytes) raises KeyError on E8M0 and F4 (safetensors#839).
EVERY = {f"t.{name}": values(dtype, 3, 4) for name, dtype in TORCH_DTYPES.items()}
ODD = {"empty": torch.empty(3, 0), "scalar": torch.tensor(2.5), 'Ж"\\\n': torch.ones(1), "": torch.zeros(2)}


def test_safetensors_opens_our_files_bit_for_bit(tmp_path):
    track = write_track(str(tmp_path), EVERY | ODD)
    with safe_open(tmp_path / track.files[0].name, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(EVERY | ODD)
        for name, tensor in (EVERY | ODD).items():
            assert same(file.get_tensor(name), tensor), name


def test_load_file_opens_our_files(tmp_path):
    track = write_track(str(tmp_path), EVERY | ODD)
    found = load_file(tmp_path / track.files[0].name)
    assert all(same(found[name], tensor) for name, tensor in (EVERY | ODD).items())


def test_we_open_files_by_safetensors_bit_for_bit(tmp_path):
    save_file(EVERY | ODD, tmp_path / "model.safetensors", metadata={"step": "3"})
    found = dict(checkpoint_tensors(str(tmp_path)))
    assert found.keys() == (EVERY | ODD).keys()
    assert all(same(found[name], tensor) for name, tensor in (EVERY | ODD).items())
    assert read_header(str(tmp_path / "model.safetensors")).metadata == {"step": "3"}


def test_specs_agree_with_what_safetensors_writes(tmp_path):
    save_file(EVERY | ODD, tmp_path / "x.safetensors")
    header = read_header(str(tmp_path / "x.safetensors"))
    assert {name: spec_of(name, tensor) for name, tensor in (EVERY | ODD).items()} == {
        name: stored.spec for name, stored in header.tensors.items()
    }


def test_dtypes_are_those_of_safetensors():
    from safetensors.torch import _TYPES

    assert {name: TORCH_DTYPES[name] for name in _TYPES} == _TYPES
    assert TORCH_DTYPES.keys() | {"F6_E2M3", "F6_E3M2"} == DTYPE_BITS.keys()


@given(state_dicts(most=8), st.integers(1, 300))
def test_any_tensors_in_any_order_survive_both_readers(tmp_path_factory, tensors, max_bytes):
    folder = tmp_path_factory.mktemp("any")
    track = write_track(str(folder), tensors, max_bytes=max_bytes)
    theirs = {}
    for file in track.files:
        theirs |= load_file(folder / file.name)
    ours = dict(load_tensors(str(folder), track, verify=True))
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensor_bytes(ours[name]) == tensor_bytes(theirs[name]) == tensor_bytes(tensor)
        assert ours[name].shape == theirs[name].shape == tensor.shape


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12, "vocab_size": 64}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    ).to(torch.bfloat16)


def test_transformers_loads_a_folder_of_our_shards(tmp_path, llama):
    from transformers import AutoModelForCausalLM

    state = {name: tensor for name, tensor in llama.state_dict().items() if name != "lm_head.weight"}
    plans = plan_shards([spec_of(name, tensor) for name, tensor in state.items()], max_bytes=100_000)
    assert len(plans) > 2
    for plan in plans:
        write_plan(str(tmp_path), plan, state)
    (tmp_path / INDEX_NAME).write_bytes(index_bytes(plans))
    (tmp_path / "config.json").write_text(json.dumps(llama.config.to_dict() | {"torch_dtype": "bfloat16"}))
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    prompt = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(prompt).logits, llama(prompt).logits)
    assert all(same(tensor, loaded.state_dict()[name]) for name, tensor in llama.state_dict().items())


def test_we_read_a_folder_saved_by_transformers(tmp_path, llama):
    llama.save_pretrained(tmp_path, max_shard_size="100KB")
    found = dict(checkpoint_tensors(str(tmp_path)))
    assert found.keys() == llama.state_dict().keys() - {"lm_head.weight"}
    assert all(same(found[name], llama.state_dict()[name]) for name in found)
