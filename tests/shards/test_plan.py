from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import DuplicateName, InvalidInput, InvalidName, UnsupportedTensor
from ckptsync.manifest import TensorSpec
from ckptsync.safetensors_format import DTYPE_BITS
from ckptsync.shards.plan import aligned, element_size, in_layer_order, layer_of, plan_shards
from ckptsync.shards.write import header_bytes

from .files import spec


def names(plans: list) -> list[list[str]]:
    return [[each.name for each in plan.tensors] for plan in plans]


def layers(count: int, size: int = 100) -> list[TensorSpec]:
    return [spec(f"layers.{i}.{part}", size, dtype="U8") for i in range(count) for part in ("a", "b")]


def test_a_shard_ends_before_the_layer_that_would_not_fit():
    plans = plan_shards([spec("embed.weight", 100, dtype="U8"), *layers(3)], max_bytes=350)
    assert names(plans) == [
        ["embed.weight", "layers.0.a", "layers.0.b"],
        ["layers.1.a", "layers.1.b"],
        ["layers.2.a", "layers.2.b"],
    ]


def test_files_are_numbered_from_one_of_their_count():
    plans = plan_shards(layers(3), max_bytes=200)
    assert [plan.file for plan in plans] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [plan.nbytes for plan in plans] == [200, 200, 200]


def test_one_shard_is_numbered_too():
    assert [plan.file for plan in plan_shards(layers(1))] == ["model-00001-of-00001.safetensors"]


def test_an_unnumbered_plan_is_one_file_whatever_its_size():
    (plan,) = plan_shards(layers(3), max_bytes=1, numbered=False, stem="adapter_model")
    assert plan.file == "adapter_model.safetensors"
    assert len(plan.tensors) == 6


def test_an_unnumbered_plan_whose_header_is_too_large_is_refused():
    with pytest.raises(InvalidInput, match="6 tensors do not fit the header"):
        plan_shards(layers(3), numbered=False, max_header=100)


def test_a_layer_larger_than_a_shard_gets_shards_of_its_own():
    big = [spec(f"layers.1.{part}", 100, dtype="U8") for part in "abc"]
    plans = plan_shards([*layers(1, 10), *big, spec("layers.2.a", 10, dtype="U8")], max_bytes=250)
    assert names(plans) == [
        ["layers.0.a", "layers.0.b"],
        ["layers.1.a", "layers.1.b"],
        ["layers.1.c"],
        ["layers.2.a"],
    ]


def test_a_tensor_larger_than_a_shard_gets_a_shard_of_its_own():
    plans = plan_shards([spec("a.w", 5), spec("b.w", 5000), spec("c.w", 5)], max_bytes=1000)
    assert names(plans) == [["a.w"], ["b.w"], ["c.w"]]


def test_no_tensors_make_no_shards():
    assert plan_shards([]) == []


def test_case_73_shards_are_cut_by_header_size_as_well_as_by_bytes():
    plans = plan_shards([spec(f"layers.{i}.w", 1) for i in range(1000)], max_header=8192)
    assert len(plans) > 10
    assert max(len(header_bytes(plan)) for plan in plans) <= 8192
    assert sum(len(plan.tensors) for plan in plans) == 1000


def test_the_source_order_is_kept():
    source = [spec("model.norm.weight", 4), spec("model.layers.10.w", 4), spec("model.layers.2.w", 4)]
    assert names(plan_shards(source)) == [[each.name for each in source]]


def test_text_sorted_names_can_be_put_in_layer_order():
    text = sorted(f"model.layers.{i}.w" for i in range(12))
    assert text[2] == "model.layers.10.w"
    found = [each.name for each in in_layer_order(spec(name, 1) for name in text)]
    assert found == [f"model.layers.{i}.w" for i in range(12)]


def test_layer_order_takes_numbers_of_any_length():
    digits = "9" * 5000  # int() refuses more than 4,300
    found = in_layer_order([spec(f"h.1{digits}", 1), spec(f"h.{digits}", 1), spec("h.007", 1)])
    assert [len(each.name) for each in found] == [5, 5002, 5003]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.10.mlp.experts.3.up_proj.weight", "model.layers.10"),
        ("transformer.h.0.attn.bias", "transformer.h.0"),
        ("0.weight", "0"),
        ("visual.blocks.7", "visual.blocks.7"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("layer10.weight", "layer10"),
        ("scale", "scale"),
    ],
)
def test_the_layer_of_a_tensor_is_its_name_up_to_the_first_number(name, layer):
    assert layer_of(name) == layer


def test_tensors_that_are_aligned_anyway_stay_in_order():
    source = [spec("a", 8, dtype="I8"), spec("b", 3), spec("c", 1, dtype="I8")]
    assert aligned(source) == tuple(source)


def test_an_odd_tensor_before_a_wider_one_makes_the_wider_ones_come_first():
    source = [spec("a", 3, dtype="I8"), spec("b", 3), spec("c", 1, dtype="F32"), spec("d", 5)]
    assert [each.name for each in aligned(source)] == ["c", "b", "d", "a"]


def test_case_72_a_tensor_named_like_the_metadata_key_is_refused():
    with pytest.raises(InvalidName, match="__metadata__"):
        plan_shards([spec("__metadata__", 1)])


def test_case_72_a_lone_surrogate_in_a_name_is_refused():
    with pytest.raises(InvalidName, match="surrogate"):
        plan_shards([spec("layer.\ud800", 1)])


def test_case_82_one_name_twice_is_refused_naming_both():
    with pytest.raises(DuplicateName, match=r"'a\.w'.*BF16\[2\] and F32\[3\]"):
        plan_shards([spec("a.w", 2), spec("b.w", 2), spec("a.w", 3, dtype="F32")])


def test_case_70_an_unsupported_dtype_is_named():
    with pytest.raises(UnsupportedTensor, match=r"'a\.w'.*'F128'"):
        plan_shards([spec("a.w", 2, dtype="F128")])


@pytest.mark.parametrize("shape", [(-1,), (1 << 62,), (1,) * 65])
def test_an_impossible_shape_is_named(shape):
    with pytest.raises(UnsupportedTensor, match="'a': shape"):
        plan_shards([TensorSpec("a", "F32", shape)])


@pytest.mark.parametrize(("dtype", "count"), [("F4", 3), ("F6_E2M3", 5)])
def test_packed_elements_that_end_within_a_byte_are_refused(dtype, count):
    with pytest.raises(UnsupportedTensor, match="whole bytes"):
        plan_shards([spec("a", count, dtype=dtype)])


def test_a_stem_that_leaves_the_folder_is_refused():
    with pytest.raises(InvalidName):
        plan_shards([spec("a", 1)], stem="../model")


_specs = st.lists(
    st.builds(
        lambda layer, part, dtype, count: TensorSpec(f"layers.{layer}.{part}", dtype, (count * 4,)),
        st.integers(0, 20),
        st.text(min_size=1, max_size=5),
        st.sampled_from(sorted(DTYPE_BITS)),
        st.integers(0, 50),
    ),
    unique_by=lambda each: each.name,
    max_size=40,
)


@given(_specs, st.integers(1, 4000))
def test_every_tensor_is_planned_once_aligned_and_within_the_limit(specs, max_bytes):
    plans = plan_shards(specs, max_bytes=max_bytes)
    planned = [each for plan in plans for each in plan.tensors]
    assert sorted(planned) == sorted(specs)
    for plan in plans:
        assert plan.nbytes <= max_bytes or len(plan.tensors) == 1
        offset = 0
        for each in plan.tensors:
            assert offset % element_size(each.dtype) == 0
            offset += each.nbytes
