"""A publisher that compares on the GPU writes the files that any publisher writes. Here the GPU is a CPU: what decides
is where a tensor is said to be."""

from __future__ import annotations

import os

import pytest
import torch

from ckptsync import Channel, DeltaPolicy, Publisher
from ckptsync.delta import messages
from ckptsync.errors import BadShard
from ckptsync.export import source
from ckptsync.ledger import Ledger
from ckptsync.verify import verify_version

from .test_versions import model, step


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "is_far", lambda tensor: tensor.dtype == torch.bfloat16)


def files(root: str) -> dict[str, bytes]:
    """Of the data folders, by number of the version and path inside."""
    found = {}
    for folder, _, names in os.walk(os.path.join(root, "data")):
        version, _, inside = os.path.relpath(folder, os.path.join(root, "data")).partition("/")
        for name in names:
            if name.endswith(".safetensors"):
                with open(os.path.join(folder, name), "rb") as file:
                    found[version.split("-")[1], inside, name] = file.read()
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_same_files_are_written_as_by_the_host_through_anchors_and_skips(tmp_path, dtype) -> None:
    roots = [str(tmp_path / name) for name in ("host", "gpu")]
    policies = [DeltaPolicy(anchor_every=4, skip=(2,), on_gpu=on) for on in (False, True)]
    publishers = [Publisher(root, delta=policy, dtype=dtype) for root, policy in zip(roots, policies, strict=True)]
    state, digests = model(), [[], []]
    for number in range(7):
        step(state, seed=number)
        for publisher, found in zip(publishers, digests, strict=True):
            found.append(publisher.publish(state).manifest.content_digest)
    assert digests[0] == digests[1]
    assert files(roots[0]) == files(roots[1])


def test_a_tensor_is_fetched_whole_only_for_the_first_version(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[list[str]] = []
    plain = source.stream_items

    def watched(shares, *given):
        fetched.append([item.name for share in shares.values() for item in share])
        return plain(shares, *given)

    monkeypatch.setattr(source, "stream_items", watched)
    publisher, state = Publisher(str(tmp_path), delta=DeltaPolicy(on_gpu=True)), model()
    publisher.publish(state)
    assert sum(map(len, fetched)) == len(state)
    fetched.clear()
    step(state, seed=1)
    done = publisher.publish(state)
    assert fetched == [["layers.1.scale"]]  # the one that is not on the GPU
    channel = Channel.open(str(tmp_path))
    assert verify_version(channel, done.version).ok


def test_the_copy_on_the_gpu_does_not_move_when_a_commit_fails(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, state = Publisher(str(tmp_path), delta=DeltaPolicy(on_gpu=True)), model()
    publisher.publish(state)

    def failing(*_: object, **__: object) -> None:
        raise OSError("the storage is down")

    with monkeypatch.context() as broken:
        broken.setattr(Ledger, "commit", failing)
        step(state, seed=1)
        with pytest.raises(OSError, match="down"):
            publisher.publish(state)
    for seed in (2, 3):
        step(state, seed=seed)
        done = publisher.publish(state)
        assert done.manifest.kind == "delta"
        assert verify_version(Channel.open(str(tmp_path)), done.version).ok


def test_nothing_is_published_where_the_hosts_copy_is_not_of_the_same_version(tmp_path) -> None:
    publisher, state = Publisher(str(tmp_path), delta=DeltaPolicy(on_gpu=True)), model()
    publisher.publish(state)
    publisher._deltas._baseline.tensors["model", "layers.0.weight"][5] ^= 1
    step(state, seed=1)
    with pytest.raises(BadShard, match="not of the base"):
        publisher.publish(state)
    assert len(list(Channel.open(str(tmp_path)).versions())) == 1
