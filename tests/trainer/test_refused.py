"""What is refused, by name, before the first byte is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ckptsync.config import PublisherConfig
from ckptsync.errors import DuplicateName, InvalidInput, InvalidName, UnsupportedTensor
from ckptsync.manifest import TensorSpec
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.version import VersionId
from tests.faults.store import HookedStore, Recorder


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"a": torch.empty(0), "b": torch.ones(2), "c": torch.empty(0)}, UnsupportedTensor, "of [13] .*'a'"),
        ({"x": torch.ones(2, device="meta")}, UnsupportedTensor, "'x'"),
        ({"x": torch.eye(2).to_sparse()}, UnsupportedTensor, "'x'"),
        ({"__metadata__": torch.ones(1)}, InvalidName, "__metadata__"),
        ({"a\ud800": torch.ones(1)}, InvalidName, "surrogate"),
        ({"m.w": torch.ones(1), "module.m.w": torch.ones(1)}, DuplicateName, "'m.w' and 'module.m.w'"),
        ({"a": [1.0]}, InvalidInput, "'a', list"),
        ({}, InvalidInput, "nothing to publish"),
    ],
    ids=["case 65", "meta", "sparse", "case 72", "case 72 surrogate", "collision", "no tensor", "empty"],
)
@pytest.mark.parametrize("as_iterator", [False, True], ids=["dict", "iterator"])
def test_what_no_reader_could_use_is_refused_by_name_before_the_first_byte(
    state: dict[str, torch.Tensor], error: type[Exception], words: str, as_iterator: bool, root: str
) -> None:
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder)) as publisher:
        recorder.seen.clear()
        with pytest.raises(error, match=words):
            publisher.publish(iter(state.items()) if as_iterator else state)
        assert recorder.changes() == []
        assert publisher.publish({"good": torch.ones(1)}).version == VersionId(1, 1)


def test_case_65_parameters_that_zero3_emptied_are_refused(root: str) -> None:
    model = nn.Linear(4, 4)
    model.weight.ds_shape = torch.Size([4, 4])
    model.weight.data = torch.empty(0)
    with Publisher(root) as publisher, pytest.raises(UnsupportedTensor, match=r"1 of 2 .*'weight'"):
        publisher.publish(model)


def test_case_82_a_name_that_a_stream_yields_twice_is_refused(root: str) -> None:
    pairs = [("a", torch.ones(1)), ("b", torch.ones(1)), ("module.a", torch.ones(1))]
    with Publisher(root) as publisher, pytest.raises(DuplicateName, match=r"'a' and 'module\.a'"):
        publisher.publish(iter(pairs))


@pytest.mark.parametrize("yielded", [["a"], ["a", "b", "c"], ["b", "a"]])
def test_a_source_that_does_not_keep_to_its_metadata_is_refused(yielded: list[str], root: str) -> None:
    class Source:
        def metadata(self) -> list[TensorSpec]:
            return [TensorSpec("a", "F32", (1,)), TensorSpec("b", "F32", (1,))]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter([(name, torch.ones(1)) for name in yielded])

    with Publisher(root) as publisher, pytest.raises(InvalidInput, match="metadata"):
        publisher.publish(Source())


@pytest.mark.parametrize("metadata", [{"loss": float("nan")}, {"x": object()}, {"x": "\ud800"}])
def test_case_72_metadata_that_is_not_json_is_refused(metadata: dict[str, object], root: str) -> None:
    with Publisher(root) as publisher:
        with pytest.raises(InvalidInput, match="metadata"):
            publisher.publish({"w": torch.ones(1)}, metadata=metadata)
        with pytest.raises(InvalidInput, match="step"):
            publisher.publish({"w": torch.ones(1)}, step="3")


@pytest.mark.parametrize(
    "setting",
    [
        {"shard_bytes": 0}, {"bucket_bytes": -1}, {"timeout": 0}, {"ties": "both"}, {"dtype": torch.int8},
        {"dtype": "bf16"}, {"digest": "md5"},
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_meant_is_refused_by_its_name(setting: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(setting))):
        PublisherConfig(**setting)


def test_an_unknown_setting_is_refused(root: str) -> None:
    with pytest.raises(InvalidInput, match="shard_size"):
        Publisher(root, shard_size=3)
