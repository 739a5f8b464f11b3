"""What is refused, by name, before the first byte is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckptsync.channel import Channel
from ckptsync.config import PublisherConfig
from ckptsync.copies import export_version
from ckptsync.delta.policy import DeltaPolicy
from ckptsync.errors import DuplicateName, InvalidInput, InvalidName, UnsupportedTensor
from ckptsync.manifest import TensorSpec
from ckptsync.publish import Publisher
from ckptsync.retention import Retention
from ckptsync.store import open_store
from ckptsync.testing.hooks import HookedStore, Recorder
from ckptsync.version import VersionId


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ({"a.weight": torch.empty(0), "a.bias": torch.ones(2)}, UnsupportedTensor, r"1 of [12] .*'a\.weight'"),
        ({"x": torch.ones(2, device="meta")}, UnsupportedTensor, "'x'"),
        ({"x": torch.eye(2).to_sparse()}, UnsupportedTensor, "'x'"),
        ({"__metadata__": torch.ones(1)}, InvalidName, "__metadata__"),
        ({"a\ud800": torch.ones(1)}, InvalidName, "surrogate"),
        ({"m.w": torch.ones(1), "module.m.w": torch.ones(1)}, DuplicateName, "'m.w' and 'module.m.w'"),
        ({"a": [1.0]}, InvalidInput, "'a', list"),
        ({"x": nested()}, UnsupportedTensor, "tensor 'x' is nested"),
        ({}, InvalidInput, "nothing to publish"),
    ],
    ids=["case 65", "meta", "sparse", "case 72", "case 72 surrogate", "collision", "no tensor", "nested", "empty"],
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


def test_a_tensor_that_is_meant_to_be_empty_is_published(root: str) -> None:
    with Publisher(root) as publisher:
        done = publisher.publish({"seen": torch.empty(0), "ids": torch.empty(0, dtype=torch.int64), "w": torch.ones(1)})
    assert [(t.name, t.shape) for t in done.manifest.tracks["model"].tensors][:2] == [("seen", (0,)), ("ids", (0,))]


@pytest.mark.parametrize("model", [[torch.ones(2)], torch.ones(2, 2), ["ab"], [("a", torch.ones(1), 3)]])
def test_what_yields_no_pairs_is_refused_with_what_is_accepted(model: object, root: str) -> None:
    with Publisher(root) as publisher, pytest.raises(InvalidInput, match=r"a module, a state dict, .*\(name, tensor\)"):
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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_lags", "'max_lag' is the nearest"),
        ("keeplast", r"retention=ckptsync\.Retention\(keep_last=\.\.\.\) is the nearest"),
        ("zzzz", r"known are run_id, .*max_lag_seconds$"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest(name: str, says: str, root: str) -> None:
    for make in (partial(Publisher, root), PublisherConfig.load):
        with pytest.raises(InvalidInput, match=f"setting '{name}' of Publisher is not known: {says}"):
            make(**{name: 3})


@pytest.mark.parametrize("name", ["../a", "/etc/a", "", "a\nb", "[b]x", "a/b"])
def test_a_tensor_name_is_a_key_inside_a_file_and_never_a_path(name: str, root: str, tmp_path: Path) -> None:
    with Publisher(root) as publisher:
        done = publisher.publish({name: torch.ones(2), "w": torch.zeros(1)})
    export_version(Channel.open(root), done.manifest, str(tmp_path / "copy"))
    (file,) = (tmp_path / "copy").glob("*.safetensors")
    assert set(load_file(file)) == {name, "w"}
    assert sorted(os.listdir(tmp_path)) == ["copy", "root"]


def test_a_forked_child_does_not_publish_with_its_parents_publisher(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Publisher(root) as publisher:
        publisher.publish({"x": torch.ones(1)})
        parent = os.getpid()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(InvalidInput, match=f"forked from {parent}, .*: make a Publisher of its own here"):
                publisher.publish({"x": torch.zeros(1)})
            with pytest.raises(InvalidInput, match="after the fork"):
                publisher.reserve()
        assert publisher.publish({"x": torch.zeros(1)}).version == VersionId(1, 2)


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["me"] = found
    return found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"number": "3"}, r"number='3': must be a whole number of at least 0"),
        ({"progress": 5}, r"progress=5: must be a function"),
        ({"background": "yes"}, r"background='yes': must be True or False"),
        ({"metadata": cyclic()}, r"metadata must be JSON: it contains itself, or is nested too deeply"),
        ({"metadata": reduce(lambda inner, _: {"a": inner}, range(5000), {})}, r"metadata must be JSON: .* too deeply"),
    ],
    ids=["number", "progress", "background", "cyclic", "deep"],
)
def test_an_argument_of_another_kind_is_refused_by_name_before_anything_is_written(
    given: dict[str, Any], words: str, root: str
) -> None:
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder)) as publisher:
        recorder.seen.clear()
        with pytest.raises(InvalidInput, match=words):
            publisher.publish({"x": torch.ones(1)}, **given)
        assert recorder.changes() == []
        assert publisher.publish({"x": torch.ones(1)}).version == VersionId(1, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"resumed_from": 7}, r"resumed_from=7: give a version such as"),
        ({"resumed_from": "newest"}, r"resumed_from='newest': give a version such as"),
        ({"remap": "w"}, r"remap='w': must be a dict of names"),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_name_and_claims_nothing(
    given: dict[str, Any], words: str, root: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        Publisher(root, **given)
    assert not os.path.exists(root)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeltaPolicy(skip=8), r"skip=8: must be a tuple, such as \(8,\)"),  # type: ignore[arg-type]
        (lambda: DeltaPolicy(skip=None), r"skip=None: must be a tuple, such as \(32,\), or \(\) for none"),  # type: ignore[arg-type]
        (lambda: DeltaPolicy(skip="48"), r"skip='48': must be a tuple"),  # type: ignore[arg-type]
        (lambda: DeltaPolicy(skip=(2.5,)), r"skip=\(2.5,\): must be different whole numbers of at least 2"),  # type: ignore[arg-type]
        (lambda: DeltaPolicy(skip=("8",)), r"skip=\('8',\): must be different whole numbers"),  # type: ignore[arg-type]
        (lambda: DeltaPolicy(skip=(True, 4)), r"skip=\(True, 4\): must be different whole numbers"),
        (lambda: DeltaPolicy(skip=(4, 4)), r"skip=\(4, 4\): must be different whole numbers"),
        (lambda: DeltaPolicy(max_ratio="x"), r"max_ratio='x': must be a number above 0 and at most 1"),  # type: ignore[arg-type]
        (lambda: DeltaPolicy(max_ratio=1.5), r"max_ratio=1.5: must be a number above 0 and at most 1"),
        (lambda: DeltaPolicy(max_ratio=True), r"max_ratio=True: must be a number above 0"),
        (lambda: DeltaPolicy(max_chain="x"), r"max_chain='x': must be greater than 0, a number"),  # type: ignore[arg-type]
        (lambda: Retention(keep_last=2, max_age="7d"), r"max_age='7d': must be greater than 0"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_of_another_kind_is_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        make()


def test_a_publisher_goes_on_from_a_label(root: str) -> None:
    with Publisher(root) as publisher:
        publisher.publish({"x": torch.ones(1)})
        publisher.publish({"x": torch.zeros(1)})
    with Publisher(root, resumed_from="e1-v1") as publisher:
        assert publisher.publish({"x": torch.ones(1)}).version == VersionId(2, 2)


def test_a_root_that_is_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InvalidInput, match=r"file is not a folder"):
        Publisher(str(file))
    assert file.read_text() == "mine"
