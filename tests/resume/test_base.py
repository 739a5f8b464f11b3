"""Version 0: the base model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptsync import resume
from ckptsync.base import publish_base
from ckptsync.channel import Channel
from ckptsync.epochs import claimed
from ckptsync.errors import InvalidInput, VersionExists
from ckptsync.publish import Publisher
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from tests.trainer.models import TinyModel, reference, same


def checkpoint(folder: Path, seed: int) -> str:
    folder.mkdir(exist_ok=True)
    shapes = {name: tensor.shape for name, tensor in reference(TinyModel(tied=False, blocks=1)).items()}
    torch.manual_seed(seed)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text('{"architectures": ["Tiny"]}')
    return str(folder)


def test_the_base_is_version_0_and_the_trainer_goes_on_from_it_with_1(tmp_path: Path) -> None:
    root, folder = str(tmp_path / "root"), checkpoint(tmp_path / "base", 1)
    assert publish_base(root, folder) == VersionId(1, 0)
    channel = Channel.open(root)
    assert channel.latest().id.label == "e1-v0"
    assert channel.resolve("0").tracks["model"].model["architecture"] == "Tiny"
    assert verify_version(channel, VersionId(1, 0)).ok
    with Publisher(root) as publisher:
        assert publisher.publish(TinyModel(tied=False, blocks=1)).version == VersionId(2, 1)
    assert channel.versions() == [VersionId(1, 0), VersionId(2, 1)]
    back = TinyModel(tied=False, blocks=1)
    assert resume(root, back, "0") is not None
    again = TinyModel(tied=False, blocks=1)
    again.load_state_dict(load_file(folder + "/model.safetensors"))
    same(reference(back), reference(again))


def test_it_may_be_called_at_every_start_and_another_base_is_refused(tmp_path: Path) -> None:
    root, folder = str(tmp_path / "root"), checkpoint(tmp_path / "base", 1)
    assert publish_base(root, folder) == publish_base(root, folder) == VersionId(1, 0)
    assert claimed(Channel.open(root).store) == [1], "no epoch is claimed for nothing, which would fence a trainer"
    with pytest.raises(VersionExists, match="another base model"):
        publish_base(root, checkpoint(tmp_path / "other", 2))


def test_a_channel_that_has_versions_gets_no_base_behind_them(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    with Publisher(root) as publisher:
        publisher.publish(TinyModel(blocks=1))
        with pytest.raises(InvalidInput, match="numbers only grow"):
            publisher.publish(TinyModel(blocks=1), number=0)
    with pytest.raises(InvalidInput, match="has versions up to e1-v1 and no base"):
        publish_base(root, checkpoint(tmp_path / "base", 1))
