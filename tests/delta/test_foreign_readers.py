"""What `export --since --profile xor` writes is what slime, miles, vime, SGLang's pull path and stitch read."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptsync import Channel, DeltaPolicy, Publisher
from ckptsync.base import publish_base
from ckptsync.copies import export_version
from ckptsync.delta.profiles import write_profile
from ckptsync.errors import InvalidInput
from ckptsync.signing import generate
from ckptsync.version import VersionId
from tests.delta.foreign import (
    INDEX,
    ApplyByText,
    Pull,
    PullByIndex,
    named,
    shards_in,
    staged_by_stitch,
    stitch_version,
)
from tests.delta.test_versions import same

LAST = 3


class Tied(torch.nn.Module):
    """Two names for one tensor, an fp32 and an fp8 one, and one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(90, 64, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(64, 90, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(64)
        self.register_buffer("scale", torch.rand(65).to(torch.float8_e4m3fn))
        self.register_buffer("still", torch.rand(7))

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.embed.weight.view(torch.int16).view(-1)[seed::97] += 1
            self.norm.weight += torch.rand(64, generator=generator) / 1000
            self.scale.view(torch.uint8)[seed] ^= 255


def all_in(folder: str) -> dict[str, torch.Tensor]:
    return {name: tensor for path in shards_in(folder) for name, tensor in load_file(path).items()}


class Published:
    """Version 0 from `base`, then three, of which the last changes nothing; their changes, each in a folder."""

    def __init__(self, folder: str, **settings) -> None:
        self.base, self.root, self.source = (os.path.join(folder, name) for name in ("base", "root", "source"))
        torch.manual_seed(1)
        model = Tied()
        os.mkdir(self.base)
        with open(os.path.join(self.base, "config.json"), "w") as file:
            file.write("{}")
        # Other stacks start from the checkpoint that the trainer started from; stitch needs its index.
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(state, os.path.join(self.base, "model.safetensors"), {"format": "pt"})
        with open(os.path.join(self.base, INDEX), "w") as file:
            json.dump({"metadata": {}, "weight_map": dict.fromkeys(state, "model.safetensors")}, file)
        publish_base(self.root, self.base, sign_key=settings.get("sign_key"))
        self.states = [state]
        with Publisher(self.root, ties="duplicate", delta=DeltaPolicy(skip=()), **settings) as publisher:
            for number in range(1, LAST + 1):
                if number < LAST:
                    model.step(number)
                publisher.publish(model)
                self.states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        self.channel = Channel.open(self.root)
        self.manifests = [self.channel.resolve(str(number)) for number in range(LAST + 1)]
        for old, new in zip(self.manifests, self.manifests[1:], strict=False):
            write_profile(self.channel, old, new, self.source, "xor")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return Published(str(tmp_path_factory.mktemp("published")))


@pytest.mark.parametrize("reader", [Pull, PullByIndex, ApplyByText])
def test_a_host_that_starts_from_the_base_model_follows_step_by_step(reader, published, tmp_path):
    local = reader(str(tmp_path / "local"), published.base, published.source)
    for number in (1, 1, 2, 3):
        local.pull(number)
        assert same(all_in(local.local), published.states[number])


@pytest.mark.parametrize("reader", [Pull, PullByIndex])
def test_a_late_host_starts_from_a_version_that_was_exported_whole(reader, published, tmp_path):
    source = str(shutil.copytree(published.source, tmp_path / "source"))
    shutil.rmtree(os.path.join(source, named(2)))
    export_version(published.channel, published.manifests[2], os.path.join(source, named(2)))
    shutil.rmtree(os.path.join(source, named(1)))
    local = reader(str(tmp_path / "local"), published.base, source)
    local.pull(LAST)
    assert same(all_in(local.local), published.states[LAST])
    assert local.applied() == LAST


def test_a_host_whose_base_is_another_one_notices(published, tmp_path):
    local = Pull(str(tmp_path / "local"), published.base, published.source)
    local.pull(0)
    with open(os.path.join(local.local, "model.safetensors"), "r+b") as file:
        file.seek(-90 * 64, os.SEEK_END)
        file.write(b"rot")
    with pytest.raises(RuntimeError, match="checksum mismatch"):
        local.pull(1)


def test_stitch_takes_a_folder_for_the_delta_that_it_is_with_the_files_that_it_needs(published):
    for number in range(1, LAST + 1):
        folder = os.path.join(published.source, named(number))
        found = stitch_version(folder, "run-a")
        assert (found.identity, found.kind) == (f"run-a/{named(number)}", "delta")
        assert {os.path.join(folder, name) for name in found.files} <= set(shards_in(folder))
        assert sorted(os.listdir(folder)) == sorted(["model-00001-of-00001.safetensors", INDEX])


@pytest.mark.parametrize("whole", [0, 2])
def test_stitch_s_engine_stages_every_version_from_the_base_or_a_full_one(whole, published, tmp_path):
    source = str(shutil.copytree(published.source, tmp_path / "source"))
    if whole:
        shutil.rmtree(os.path.join(source, named(whole)))
        export_version(published.channel, published.manifests[whole], os.path.join(source, named(whole)))
    for number in range(1, LAST + 1):
        expected = {name: bytes(tensor.view(-1).view(torch.uint8).numpy())
                    for name, tensor in published.states[number].items()}  # fmt: skip
        assert staged_by_stitch(published.base, source, number) == expected


def test_stitch_does_not_take_an_exported_full_version_as_the_docs_say(published, tmp_path):
    export_version(published.channel, published.manifests[1], str(tmp_path / "full"))
    with pytest.raises(KeyError, match="version"):
        stitch_version(str(tmp_path / "full"), "run-a")


def test_the_digests_of_a_signed_channel_are_read_as_well(tmp_path):
    generate(str(tmp_path / "key"))
    published = Published(str(tmp_path), sign_key=str(tmp_path / "key"))
    assert published.manifests[1].digest == "blake3"
    local = Pull(str(tmp_path / "local"), published.base, published.source)
    local.pull(LAST)
    assert same(all_in(local.local), published.states[LAST])


def test_versions_that_are_not_neighbours_are_refused_since_no_reader_goes_from_one_to_the_other(published, tmp_path):
    for old, new in ((0, 2), (2, 1)):
        with pytest.raises(InvalidInput, match=r"go from one number to the next"):
            write_profile(published.channel, published.manifests[old], published.manifests[new], str(tmp_path), "xor")
    with pytest.raises(InvalidInput, match="is the version itself"):
        write_profile(published.channel, published.manifests[1], published.manifests[1], str(tmp_path), "open")
    assert os.listdir(tmp_path) == []
    assert VersionId(2, 1) == published.manifests[1].id


def test_versions_of_different_models_are_refused_by_name_with_the_first_tensor_that_differs(tmp_path):
    root = str(tmp_path / "root")
    with Publisher(root) as publisher:
        old = publisher.publish({"a": torch.ones(2), "b": torch.ones(2)}).manifest
        new = publisher.publish({"a": torch.ones(2), "b": torch.ones(3)}).manifest
    said = r"e1-v1 and e1-v2 do not have the same tensors: 1 of another dtype or shape: b F32 \[2\], now F32 \[3\]"
    with pytest.raises(InvalidInput, match=said):
        write_profile(Channel.open(root), old, new, str(tmp_path / "out"), "open")
    assert not (tmp_path / "out").exists()
