"""What is refused before anything is written, and what is said about it."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptsync.channel import Channel
from ckptsync.copies import import_version
from ckptsync.errors import BadShard


def other_model(folder: str, **config: object) -> str:
    """The folder with another hidden size in its first tensor, and one tensor fewer."""
    path = os.path.join(folder, "model.safetensors")
    state = load_file(path)
    del state["model.layers.11.mlp.weight"]
    state["model.embed_tokens.weight"] = torch.zeros(64, 16, dtype=torch.bfloat16)
    save_file(state, path)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump({"architectures": ["LlamaForCausalLM"], **config}, file)
    return folder


def epochs(root: str) -> list[int]:
    return list(Channel.open(root).claims())


def test_a_checkpoint_without_its_config_is_not_published(ckptsync, hf_folder, root):
    source = hf_folder()
    os.remove(os.path.join(source, "config.json"))
    ran = ckptsync("publish", root, "--from", source)
    assert ran.code == 2
    assert "it has no config.json" in ran.err
    assert not os.path.exists(root)


def test_another_model_than_the_channels_is_published_only_if_that_is_said(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder(0))
    other = other_model(hf_folder(1), hidden_size=32)
    ran = ckptsync("publish", root, "--from", other)
    assert ran.code == 2
    assert "is another model than e1-v1: 1 only in the older: model.layers.11.mlp.weight; " in ran.err
    assert "model.embed_tokens.weight BF16 [32, 16], now BF16 [64, 16]" in ran.err
    assert "--allow-schema-change" in ran.err
    assert epochs(root) == [1], "no trainer is fenced for it"
    assert ckptsync("publish", root, "--from", other, "--allow-schema-change").code == 0


def test_another_architecture_with_the_same_tensors_is_another_model(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder(0))
    other = hf_folder(1)
    with open(os.path.join(other, "config.json"), "w") as file:
        file.write('{"architectures": ["QwenForCausalLM"]}')
    ran = ckptsync("publish", root, "--from", other)
    assert ran.code == 2
    assert "QwenForCausalLM, and LlamaForCausalLM before" in ran.err


def test_a_channel_does_not_lie_in_the_checkpoint_that_it_is_made_from(ckptsync, hf_folder):
    source = hf_folder()
    for root in (source, os.path.join(source, "channel")):
        ran = ckptsync("publish", root, "--from", source)
        assert (ran.code, "keep the channel out of" in ran.err) == (2, True)
    assert sorted(os.listdir(source)) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("verb", ["publish", "import"])
def test_a_root_that_is_a_file_is_a_wrong_call_for_writing_commands_too(ckptsync, hf_folder, root, tmp_path, verb):
    source = hf_folder()
    with open(root, "w") as file:
        file.write("not a channel")
    ran = ckptsync("publish", root, "--from", source) if verb == "publish" else ckptsync("import", root, str(tmp_path))
    assert ran.code == 2
    assert "is not a folder" in ran.err


@pytest.mark.parametrize("verb", ["publish", "import"])
def test_an_empty_folder_is_a_wrong_call(ckptsync, root, tmp_path, verb):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    ran = ckptsync(*(("publish", root, "--from", empty) if verb == "publish" else ("import", root, empty)))
    assert ran.code == 2, ran.err
    assert ("is no checkpoint" if verb == "publish" else "is no exported version") in ran.err
    assert not os.path.exists(root)


DAMAGE = {
    "a cut file": (lambda folder: os.truncate(f"{folder}/model.safetensors", 900), "truncated"),
    "a config that is no JSON": (lambda folder: overwrite(f"{folder}/config.json", "{"), "is not a JSON object"),
    "a config of another shape": (
        lambda folder: overwrite(f"{folder}/config.json", '{"architectures": 5}'), "not a list of names",
    ),
    "no tensors": (lambda folder: save_file({}, f"{folder}/model.safetensors"), "nothing to publish"),
    "emptied tensors": (
        lambda folder: save_file({"m.weight": torch.zeros(0)}, f"{folder}/model.safetensors"), "empty placeholders",
    ),
}  # fmt: skip


def overwrite(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_fences_no_trainer(ckptsync, hf_folder, root, damage):
    spoil, why = DAMAGE[damage]
    source = hf_folder()
    spoil(source)
    ran = ckptsync("publish", root, "--from", source, "--allow-schema-change")
    assert ran.code != 0
    assert why in ran.err
    assert source in ran.err
    assert not os.path.exists(root)


@pytest.mark.parametrize("step", ["-1", str(1 << 63)])
def test_a_step_that_no_reader_takes_is_refused(ckptsync, hf_folder, root, step):
    ran = ckptsync("publish", root, "--from", hf_folder(), "--step", step)
    assert (ran.code, f"step={step}: must be 0 or more, and less than 2**63" in ran.err) == (2, True)
    assert not os.path.exists(root)


def test_an_export_does_not_go_into_the_channel(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder())
    before = sorted(os.listdir(root))
    for folder in (root, os.path.join(root, "copy")):
        ran = ckptsync("export", root, "1", folder)
        assert (ran.code, "is in the channel's own root" in ran.err) == (2, True)
    assert sorted(os.listdir(root)) == before


def test_a_damaged_export_fences_no_trainer(ckptsync, hf_folder, root, tmp_path):
    ckptsync("publish", root, "--from", hf_folder())
    copy = str(tmp_path / "copy")
    ckptsync("export", root, "1", copy)
    os.truncate(os.path.join(copy, "config.json"), 3)
    with pytest.raises(BadShard, match=r"config\.json: 3 bytes"):
        import_version(Channel.open(root), copy, "import")
    assert epochs(root) == [1]


def test_what_export_since_wrote_is_refused_by_import_with_the_reason(ckptsync, hf_folder, root, tmp_path):
    ckptsync("publish", root, "--from", hf_folder(0))
    ckptsync("publish", root, "--from", hf_folder(1))
    done = ckptsync("export", root, "2", tmp_path / "out", "--since", "1", "--json").json
    assert (done["since"], done["version"]) == ("e1-v1", "e2-v2")
    assert done["bytes"] == sum(entry.stat().st_size for entry in os.scandir(done["folder"]))
    ran = ckptsync("import", str(tmp_path / "other"), done["folder"])
    assert ran.code == 2
    assert "what `export --since` writes is for other stacks" in ran.err


def test_diff_of_two_models_says_what_differs_and_is_bad(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder(0))
    ckptsync("publish", root, "--from", other_model(hf_folder(1)), "--allow-schema-change")
    ran = ckptsync("diff", root, "1", "2")
    assert ran.code == 1
    assert "elements of the 11 tensors in both changed" in ran.out
    assert "e1-v1 and e2-v2 have not the same tensors" in ran.out
    assert "1 only in the older: model.layers.11.mlp.weight" in ran.out
    assert "1 of another dtype or shape: model.embed_tokens.weight BF16 [32, 16], now BF16 [64, 16]" in ran.out
    found = ckptsync("diff", root, "1", "2", "--json").json
    assert found["removed"] == ["model.layers.11.mlp.weight"]
    assert found["reshaped"] == {"model.embed_tokens.weight": ["BF16 [32, 16]", "BF16 [64, 16]"]}


def test_diff_of_models_without_a_tensor_in_common_does_not_speak_of_elements(ckptsync, hf_folder, root):
    ckptsync("publish", root, "--from", hf_folder(0))
    other = hf_folder(1)
    path = os.path.join(other, "model.safetensors")
    save_file({f"encoder.{name}": tensor for name, tensor in load_file(path).items()}, path)
    ckptsync("publish", root, "--from", other, "--allow-schema-change")
    ran = ckptsync("diff", root, "1", "2", "--layers")
    assert ran.code == 1
    assert "e1-v1 and e2-v2 have no tensor in common" in ran.out
    assert "elements" not in ran.out
