"""One process publishes: what is in the folder, under which names and numbers."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckptsync.channel import Channel
from ckptsync.errors import (
    ChannelEmpty,
    Fenced,
    InvalidInput,
    StoreDenied,
    VersionExists,
)
from ckptsync.export.source import CheckpointSource
from ckptsync.manifest import Manifest, TensorSpec
from ckptsync.publish import Publisher
from ckptsync.published import Published
from ckptsync.shards.tensors import load_tensors
from ckptsync.store import open_store
from ckptsync.testing.hooks import Failing, HookedStore, Recorder, matching
from ckptsync.version import VersionId
from tests.trainer.models import TinyModel, reference, same


def folder(root: str, manifest: Manifest) -> str:
    return os.path.join(root, manifest.folder)


def loaded(root: str, done: Published) -> dict[str, torch.Tensor]:
    return dict(load_tensors(folder(root, done.manifest), done.manifest.tracks["model"], verify=True))


def publish(root: str, model: object, **settings: object) -> Published:
    with Publisher(root, **settings) as publisher:
        return publisher.publish(model)


# -- what is published ---------------------------------------------------------------------------------------


def test_a_module_a_state_dict_a_source_and_an_iterator_give_the_same_content(root: str) -> None:
    model = TinyModel()

    class Source:
        def metadata(self) -> list[TensorSpec]:
            return [TensorSpec(n, "F32", tuple(t.shape)) for n, t in model.state_dict().items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(model.state_dict().items())

    with Publisher(root) as publisher:
        ways = [model, model.state_dict(), Source(), iter(model.state_dict().items())]
        done = [publisher.publish(way) for way in ways]
    for each in done:
        same(loaded(root, each), reference(model))
    assert len({each.content_digest for each in done}) == 1
    assert [each.changed for each in done] == [True, False, False, False]
    assert [str(each.version) for each in done] == ["e1-v1", "e1-v2", "e1-v3", "e1-v4"]
    assert "layers.0.scratch" not in loaded(root, done[0]), "a buffer that is not persistent"


def test_floating_tensors_wider_than_the_wire_dtype_are_cast_and_no_others(root: str) -> None:
    state = {
        "double": torch.rand(3, dtype=torch.float64),
        "single": torch.rand(3),
        "half": torch.rand(3, dtype=torch.float16),
        "brain": torch.rand(3, dtype=torch.bfloat16),
        "eight": torch.rand(3).to(torch.float8_e4m3fn),
        "ids": torch.arange(3),
        "flag": torch.tensor([True]),
    }
    found = loaded(root, publish(root, state, dtype=torch.bfloat16))
    same(found, state | {name: state[name].bfloat16() for name in ("double", "single")})


def test_case_66_ties_are_stored_once_with_an_alias_and_views_of_one_buffer_are_tensors_of_their_own(
    root: str,
) -> None:
    flat = torch.arange(12.0)
    state = {"a": flat[:6].view(2, 3), "b": flat[6:], "overlap": flat[:3], "a.again": flat[:6].view(2, 3)}
    once = publish(root, state)
    twice = publish(root, state, ties="duplicate")
    same(loaded(root, once), state)
    same(loaded(root, twice), state)
    stored, duplicated = (
        {t.name: (t.alias_of, bool(t.file)) for t in done.manifest.tracks["model"].tensors} for done in (once, twice)
    )
    assert stored == {"a": ("", True), "b": ("", True), "overlap": ("", True), "a.again": ("a", False)}
    assert duplicated["a.again"] == ("a", True)
    assert once.content_digest == twice.content_digest
    assert once.manifest.producer["ties"] == "omit"
    index = json.loads(Path(folder(root, once.manifest), "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["a", "b", "overlap"]


def test_case_68_69_transposed_and_zero_size_tensors_come_back_as_they_were(root: str) -> None:
    state = {
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "strided": torch.arange(10)[::2],
        "none": torch.empty(0, 4),
        "none either": torch.empty(3, 0, dtype=torch.bfloat16),
        "scalar": torch.tensor(7.0),
    }
    done = publish(root, state)
    same(loaded(root, done), state)
    assert not any(tensor.alias_of for tensor in done.manifest.tracks["model"].tensors)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.compile's own imports
def test_case_74_wrapper_names_are_taken_off_and_the_manifest_says_which(root: str) -> None:
    model = TinyModel(blocks=2)
    compiled = torch.compile(model)
    done = publish(root, nn.parallel.DataParallel(compiled))
    same(loaded(root, done), reference(model))
    assert done.manifest.producer["removed_from_names"] == ["_orig_mod", "module"]

    names = ["module._orig_mod.a", "b._fsdp_wrapped_module.c", "d._checkpoint_wrapped_module.e", "f.module.g"]
    done = publish(root, iter([(name, torch.ones(1)) for name in names]))
    assert sorted(loaded(root, done)) == ["a", "b.c", "d.e", "f.module.g"]


def test_shards_hold_whole_layers_in_layer_order_also_from_a_dict_sorted_as_text(root: str) -> None:
    state = {name: torch.rand(4) for name in sorted(f"layers.{n}.{part}" for n in range(12) for part in "ab")}
    done = publish(root, state, shard_bytes=100)
    files = [tensor.file for tensor in done.manifest.tracks["model"].tensors]
    assert [tensor.name for tensor in done.manifest.tracks["model"].tensors] == [
        f"layers.{n}.{part}" for n in range(12) for part in "ab"
    ]
    assert files == sorted(files)
    assert len(set(files)) == 4, "three layers of 32 bytes each"
    stream = publish(root, iter(sorted(state.items(), key=lambda item: int(item[0].split(".")[1]))), shard_bytes=100)
    assert [tensor.file[:11] for tensor in stream.manifest.tracks["model"].tensors] == [file[:11] for file in files]


def test_tensors_that_would_lie_on_odd_addresses_are_reordered_inside_their_shard(root: str) -> None:
    state = {
        "l.0.a": torch.ones(3, dtype=torch.int8),
        "l.0.b": torch.rand(4),
        "l.1.a": torch.ones(5, dtype=torch.int8),
    }
    same(loaded(root, publish(root, state)), state)
    same(loaded(root, publish(root, iter(state.items()))), state)


def test_a_generator_may_reuse_its_buffer(root: str) -> None:
    buffer = torch.empty(4)
    done = publish(root, ((f"t{n}", buffer.fill_(n)) for n in range(5)))
    same(loaded(root, done), {f"t{n}": torch.full((4,), float(n)) for n in range(5)})


def test_a_stream_holds_one_shard_and_a_module_nothing(root: str) -> None:
    store = open_store(root)

    def peak(model: object) -> int:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = memory("VmRSS")
        publish(store, model, shard_bytes=8 << 20)
        return memory("VmHWM") - before

    size, count = 1 << 20, 32
    tensors = {f"layers.{n}.w": torch.full((size,), float(n)) for n in range(count)}
    publish(store, {"w": torch.ones(size)})  # the store's own buffers are made on first use
    assert peak(tensors) < 48 << 20, "of 128 MiB"
    assert peak((f"layers.{n}.w", torch.full((size,), float(n))) for n in range(count)) < 96 << 20


def memory(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def test_a_checkpoint_folder_is_published_as_it_is(root: str, tmp_path: Path) -> None:
    first = publish(root, TinyModel(tied=False), shard_bytes=900)
    again = publish(str(tmp_path / "other"), CheckpointSource(folder(root, first.manifest)))
    assert again.content_digest == first.content_digest


# -- the folder ----------------------------------------------------------------------------------------------


def test_the_folder_is_a_hugging_face_checkpoint(root: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    base = tmp_path / "base"
    base.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "merges.txt",
        "modeling_x.py",
    ):
        (base / name).write_text(name)
    (base / "model.safetensors").write_text("not ours to copy")
    (base / "tokenizer").mkdir()
    with Publisher(root, dtype=torch.bfloat16, shard_bytes=5000) as publisher:
        done = publisher.publish(model, assets=base)

    here = folder(root, done.manifest)
    shards = sorted({tensor.file for tensor in done.manifest.tracks["model"].tensors if tensor.file})
    assert sorted(os.listdir(here)) == sorted(
        [*shards, "chat_template.jinja", "ckptsync.json", "config.json", "generation_config.json",
        "merges.txt",
         "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    )  # fmt: skip
    assert {file.name for file in done.manifest.tracks["model"].files} == set(os.listdir(here)) - {"ckptsync.json"}
    assert json.loads(Path(here, "config.json").read_text())["dtype"] == "bfloat16"
    facts = done.manifest.tracks["model"].model
    assert facts["architecture"] == "LlamaForCausalLM"
    assert set(facts) == {"architecture", "config_digest", "schema_digest"}

    back = transformers.AutoModelForCausalLM.from_pretrained(here)
    assert back.dtype == torch.bfloat16
    same(back.state_dict(), reference(model, torch.bfloat16))
    together = {name: tensor for shard in shards for name, tensor in load_file(Path(here, shard)).items()}
    same(
        together,
        {name: t for name, t in reference(model, torch.bfloat16).items() if name != "lm_head.weight"},
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch.compile's own imports
def test_the_config_of_a_compiled_model_names_the_class_that_engines_know(root: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
    )  # fmt: skip
    done = publish(root, torch.compile(transformers.LlamaForCausalLM(config)))
    assert done.manifest.tracks["model"].model["architecture"] == "LlamaForCausalLM"


def test_case_38_files_honour_the_umask(root: str) -> None:
    before = os.umask(0o027)
    try:
        done = publish(root, {"w": torch.ones(2)})
    finally:
        os.umask(before)
    files = [os.path.join(folder(root, done.manifest), name) for name in os.listdir(folder(root, done.manifest))]
    assert {stat.S_IMODE(os.stat(file).st_mode) for file in files} == {0o640}


def test_an_unreadable_assets_folder_is_an_error_and_nothing_is_published(root: str) -> None:
    with Publisher(root) as publisher, pytest.raises(InvalidInput, match="nowhere"):
        publisher.publish({"w": torch.ones(2)}, assets="/nowhere")
    with pytest.raises(ChannelEmpty):
        Channel.open(root).latest()


# -- numbers -------------------------------------------------------------------------------------------------


def test_case_33_a_retry_of_the_same_version_is_a_no_op_and_other_content_is_refused(root: str) -> None:
    with Publisher(root) as publisher:
        first = publisher.publish({"w": torch.ones(2)}, number=5)
        retry = publisher.publish({"w": torch.ones(2)}, number=5)
        assert retry.manifest == first.manifest
        assert not retry.changed
        with pytest.raises(VersionExists, match="e1-v5"):
            publisher.publish({"w": torch.zeros(2)}, number=5)
        with pytest.raises(InvalidInput, match="next one is 6"):
            publisher.publish({"w": torch.zeros(2)}, number=3)
        assert publisher.publish({"w": torch.zeros(2)}).version == VersionId(1, 6)
    assert [str(version) for version in Channel.open(root).committed()] == ["e1-v5", "e1-v6"]
    assert len(os.listdir(os.path.join(root, "data"))) == 2, "the retries took their files away"


def test_case_22_a_trainer_that_resumed_earlier_goes_on_from_there(root: str) -> None:
    with Publisher(root, run_id="first") as publisher:
        for value in range(1, 5):
            publisher.publish({"w": torch.full((2,), float(value))})
    with Publisher(root, run_id="second", resumed_from=VersionId(1, 2)) as publisher:
        done = publisher.publish({"w": torch.zeros(2)})
    assert done.version == VersionId(2, 3)
    assert Channel.open(root).latest().id == VersionId(2, 3)
    assert done.manifest.run_id == "second"


def test_an_older_publisher_is_fenced_before_it_writes_anything(root: str) -> None:
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder)) as older, Publisher(root) as newer:
        newer.publish({"w": torch.ones(2)})
        recorder.seen.clear()
        with pytest.raises(Fenced):
            older.publish({"w": torch.zeros(2)})
    assert recorder.changes() == []


def test_case_9_weights_that_did_not_change_are_published_with_a_warning(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(2)}
    with Publisher(root) as publisher, caplog.at_level(logging.WARNING):
        assert publisher.publish(state).changed
        assert caplog.text == ""
        assert not publisher.publish(state).changed
        assert "e1-v2 has exactly the weights of e1-v1" in caplog.text
        state["w"] += 1
        assert publisher.publish(state).changed
    with Publisher(root) as publisher:
        assert not publisher.publish(state).changed, "the version that was resumed from counts as well"


def test_progress_and_times_are_reported(root: str) -> None:
    moved: list[int] = []
    with Publisher(root) as publisher:
        done = publisher.publish({"a": torch.ones(2), "b": torch.ones(3)}, progress=moved.append)
    assert moved == [8, 12]
    assert set(done.seconds) == {"gather", "write", "commit"}
    assert done.nbytes == sum(file.size for file in done.manifest.tracks["model"].files)


def test_case_17_what_a_dead_attempt_left_is_swept_by_the_next_publisher_after_the_grace_time(root: str) -> None:
    with Publisher(root) as publisher:
        publisher.publish({"w": torch.ones(4)})
    left = os.path.join(root, "data", "e0001-v00000002-dead")
    os.makedirs(left)
    path = os.path.join(left, "model-00001-of-00001.safetensors")
    with open(path, "wb") as file:
        file.write(b"half a shard")
    Publisher(root).close()
    assert os.path.exists(path), "it may still be somebody's"
    os.utime(path, (0, 0))
    Publisher(root, sweep_after=None).close()
    assert os.path.exists(path), "sweeping can be turned off"
    with Publisher(root) as publisher:
        assert not os.path.exists(left)
        publisher.publish({"w": torch.zeros(4)})
    assert len(Channel.open(root).versions()) == 2


def test_a_sweep_that_the_store_refuses_is_a_warning_and_publishing_goes_on(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Publisher(root) as publisher:
        publisher.publish({"w": torch.ones(4)})
    refused = Failing(lambda: StoreDenied("no deletes here"), matching("write", part="data/probe-"))
    with Publisher(HookedStore(open_store(root), refused)) as publisher:
        assert publisher.publish({"w": torch.zeros(4)}).version.label == "e2-v2"
    assert "was not swept: no deletes here" in caplog.text


def test_another_model_than_before_is_published_with_a_warning_that_says_what_differs(root, caplog):
    with Publisher(root) as publisher:
        publisher.publish({"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(2)})
        publisher.publish({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2)})
        assert "another model" not in caplog.text
        publisher.publish({"a.weight": torch.ones(3, 2), "c.weight": torch.ones(2)})
    assert "e1-v3 is another model than e1-v2, engines will refuse it: 1 only in the older: b.weight" in caplog.text
    assert "a.weight F32 [2, 2], now F32 [3, 2]" in caplog.text


def test_a_name_of_any_length_is_shortened_in_the_warning_of_another_model(root, caplog):
    with Publisher(root) as publisher:
        publisher.publish({"w": torch.zeros(2)})
        publisher.publish({"long" * 25_000: torch.zeros(2)})
    (warned,) = [record.getMessage() for record in caplog.records if "another model" in record.getMessage()]
    assert "1 only in the newer: longlong" in warned
    assert len(warned) < 300
