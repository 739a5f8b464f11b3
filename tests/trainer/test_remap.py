"""Names on their way out: rules, prefixes, tracks, and what an engine expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.config import PublisherConfig
from ckptsync.errors import DuplicateName, InvalidInput
from ckptsync.publish import Publisher
from ckptsync.published import Published
from ckptsync.shards.tensors import load_tensors
from ckptsync.verify import verify_version
from tests.trainer.models import TinyModel, reference, same
from tests.trainer.test_sources import loaded

STATE = {
    "model.layers.0.w": torch.ones(2), "model.layers.1.w": torch.ones(3), "visual.proj": torch.ones(4),
    "lm_head.weight": torch.ones(5),
}  # fmt: skip


def publish(root: str, state: object = STATE, **settings: object) -> Published:
    with Publisher(root, **settings) as publisher:
        return publisher.publish(state)


def names(done: Published, track: str = "model") -> list[str]:
    return [tensor.name for tensor in done.manifest.tracks[track].tensors]


def test_the_first_rule_that_matches_decides_and_null_drops(root: str) -> None:
    rules = [("model.layers.0.*", "first.*"), ("model.*", "m.*"), ("*.proj", None)]
    done = publish(root, remap=rules, param_prefix="language.")
    assert names(done) == ["language.first.w", "language.m.layers.1.w", "language.lm_head.weight"]
    assert done.manifest.producer["dropped"] == ["visual.proj"]


def test_removed_names_are_in_the_manifest_also_from_a_stream(root: str) -> None:
    for state in (STATE, iter(STATE.items())):
        done = publish(root, state, remove=["visual.*", "lm_head.weight"])
        assert names(done) == ["model.layers.0.w", "model.layers.1.w"]
        assert done.manifest.producer["dropped"] == ["visual.proj", "lm_head.weight"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"remap": {"a.*": "b"}}, "same number"),
        ({"remap": {"a": "b.*"}}, "same number"),
        ({"remap": {"a.*.*": "b.*.*"}}, r"at most one '\*'"),
        ({"remap": {"": "b"}}, "at most one"),
        ({"remap": {"a": 3}}, "at most one"),
        ({"remap": [("a", "b"), ("a", "c")]}, "more than once"),
        ({"remap": {"a": "b"}, "remove": ["a"]}, "more than once"),
        ({"remove": "visual.*"}, "must be a list"),
        ({"param_prefix": 3}, "param_prefix"),
        ({"run_id": 3}, "run_id"),
        ({"track_prefix": {"a": "x.", "b": "x."}}, "same prefix"),
        ({"track_prefix": {"a/b": "x."}}, "track"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused_before_anything_is_published(
    setting: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        PublisherConfig(**setting)


@pytest.mark.parametrize("as_stream", [False, True], ids=["dict", "stream"])
def test_a_rule_that_matches_nothing_is_refused_as_mistyped(as_stream: bool, root: str) -> None:
    state = iter(STATE.items()) if as_stream else STATE
    with pytest.raises(InvalidInput, match=r"no tensor is named like 'vision\.\*'"):
        publish(root, state, remap={"vision.*": None})
    assert Channel.open(root).committed() == []


@pytest.mark.parametrize("as_stream", [False, True], ids=["dict", "stream"])
def test_two_names_that_become_one_are_both_named(as_stream: bool, root: str) -> None:
    state = iter(STATE.items()) if as_stream else STATE
    with pytest.raises(DuplicateName, match=r"'model\.layers\.0\.w' and 'lm_head\.weight' both become 'x'"):
        publish(root, state, remap={"model.layers.0.w": "x", "lm_head.weight": "x"})


def test_a_tie_whose_first_name_is_dropped_is_stored_under_the_other(root: str) -> None:
    model = TinyModel(blocks=1)
    done = publish(root, model, remove=["embed.weight"])
    expected = reference(model)
    del expected["embed.weight"]
    same(loaded(root, done.manifest), expected)


# -- tracks --------------------------------------------------------------------------------------------------


def test_several_models_make_one_version_and_one_commit(root: str) -> None:
    models = {"ar": TinyModel(blocks=1), "diffusion": TinyModel(blocks=2, tied=False)}
    with Publisher(root, shard_bytes=900) as publisher:
        done = publisher.publish(tracks=models, step=1)
        held = publisher.publish(tracks=models, step=2, background=True).result()
    for each in (done, held):
        for track, model in models.items():
            same(loaded(root, each.manifest, track), reference(model))
    assert sorted(done.manifest.tracks) == ["ar", "diffusion"]
    assert not held.changed
    channel = Channel.open(root)
    assert verify_version(channel, done.version).ok
    index = Path(root, done.manifest.folder, "ar", "model.safetensors.index.json")
    assert set(json.loads(index.read_text())["weight_map"]) == set(reference(models["ar"])) - {"head.weight"}


def test_one_model_is_split_into_tracks_by_prefix_and_a_name_of_no_track_is_refused(root: str) -> None:
    done = publish(root, track_prefix={"model": "model.", "visual": "visual."}, remove=["lm_head.weight"])
    assert names(done) == ["layers.0.w", "layers.1.w"]
    assert names(done, "visual") == ["proj"]
    folder = Path(root, done.manifest.folder)
    same(dict(load_tensors(str(folder / "visual"), done.manifest.tracks["visual"])), {"proj": STATE["visual.proj"]})
    with pytest.raises(InvalidInput, match=r"'lm_head\.weight' belongs to no track"):
        publish(root, track_prefix={"model": "model.", "visual": "visual."})


def test_a_model_and_tracks_at_once_or_assets_of_no_track_are_refused(root: str, tmp_path: Path) -> None:
    with Publisher(root) as publisher:
        with pytest.raises(InvalidInput, match="either"):
            publisher.publish(STATE, tracks={"a": STATE})
        with pytest.raises(InvalidInput, match="no track 'b'"):
            publisher.publish(tracks={"a": STATE}, assets={"b": str(tmp_path)})
        (tmp_path / "config.json").write_text("{}")
        done = publisher.publish(tracks={"a": STATE}, assets={"a": str(tmp_path)})
    assert Path(root, done.manifest.folder, "a", "config.json").exists()


# -- coverage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_stream", [False, True], ids=["dict", "stream"])
def test_case_76_77_what_is_missing_or_unexpected_is_shown_by_name(as_stream: bool, root: str) -> None:
    def state() -> object:
        return iter(STATE.items()) if as_stream else STATE

    expect = ["language_model.layers.0.w", *list(STATE)[1:]]
    words = r"1 missing \('language_model\.layers\.0\.w'\); 1 unexpected \('model\.layers\.0\.w'\)"
    with pytest.raises(InvalidInput, match=words):
        publish(root, state(), expect=expect)
    assert Channel.open(root).committed() == []
    publish(root, state(), expect=list(STATE))
    publish(root, state(), expect=list(STATE), remove=["visual.*"])


def test_the_expected_names_come_from_a_checkpoint_folder_or_its_index(root: str, tmp_path: Path) -> None:
    """A checkpoint lists one name of a tied pair: either is right."""
    base = publish(str(tmp_path / "base"), TinyModel(blocks=1))
    folder = tmp_path / "base" / base.manifest.folder
    index = folder / "model.safetensors.index.json"
    publish(root, TinyModel(blocks=1), expect=str(folder))
    publish(root, TinyModel(blocks=1), expect=str(index))
    (tmp_path / "single").mkdir()
    shard = folder / base.manifest.tracks["model"].files[0].name
    (tmp_path / "single" / "model.safetensors").write_bytes(shard.read_bytes())
    publish(root, TinyModel(blocks=1), expect=str(tmp_path / "single"))
    with pytest.raises(InvalidInput, match="6 unexpected"):
        publish(root, TinyModel(blocks=2), expect=str(index))
    with pytest.raises(LookupError):
        publish(root, TinyModel(blocks=2), expect=str(tmp_path))
