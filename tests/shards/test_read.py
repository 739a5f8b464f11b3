from __future__ import annotations

import errno
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import BadShard, StoreDenied, StoreError
from ckptsync.manifest import FileEntry, TensorEntry, TensorSpec, Track
from ckptsync.safetensors_format import DTYPE_BITS, MAX_HEADER
from ckptsync.shards.plan import ShardPlan
from ckptsync.shards.read import check_header, read_header
from ckptsync.shards.write import header_bytes

from .files import MemoryReader, raw_shard, spec


def entry(begin: int, end: int, dtype: str = "U8", shape: list | None = None) -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


GOOD = raw_shard({"__metadata__": {"format": "pt"}, "b": entry(2, 6, "BF16", [2]), "a": entry(0, 2)}, b"aabbbb")


def refused(data: bytes, match: str) -> None:
    with pytest.raises(BadShard, match=match):
        read_header(MemoryReader(data))


def test_a_good_header_is_read_in_file_order():
    header = read_header(MemoryReader(GOOD))
    assert [stored.spec for stored in header.tensors.values()] == [spec("a", 2, dtype="U8"), spec("b", 2)]
    assert [stored.offset for stored in header.tensors.values()] == [header.data_start, header.data_start + 2]
    assert header.size == len(GOOD)
    assert header.metadata == {"format": "pt"}


def test_metadata_may_be_absent_or_null():
    assert read_header(MemoryReader(raw_shard({}))).metadata == {}
    assert read_header(MemoryReader(raw_shard({"__metadata__": None}))).metadata == {}


def test_a_header_padded_with_spaces_is_good():
    text = json.dumps({"a": entry(0, 2)}).encode() + b" " * 100
    assert list(read_header(MemoryReader(raw_shard(text, b"aa"))).tensors) == ["a"]


def test_a_tensor_without_elements_shares_its_offset():
    empty = {"dtype": "F32", "shape": [0, 7], "data_offsets": [2, 2]}
    header = read_header(MemoryReader(raw_shard({"b": entry(2, 4), "e": empty, "a": entry(0, 2)}, b"aabb")))
    assert list(header.tensors) == ["a", "e", "b"]


def test_case_80_a_trailing_byte_is_refused():
    refused(GOOD + b"\0", "tensors end at byte .* but the file at")


def test_a_file_cut_anywhere_is_refused():
    for length in range(len(GOOD)):
        refused(GOOD[:length], ".")


def test_a_length_beyond_the_file_is_refused_before_it_is_allocated():
    reader = MemoryReader((50_000_000).to_bytes(8, "little") + b"{}" * 100)
    with pytest.raises(BadShard, match="truncated"):
        read_header(reader)
    assert reader.asked == [8]


def test_case_73_a_length_beyond_the_limit_is_refused_before_it_is_allocated():
    reader = MemoryReader((MAX_HEADER + 1).to_bytes(8, "little"), size=1 << 40)
    with pytest.raises(BadShard, match="100000001"):
        read_header(reader)
    assert reader.asked == [8]


@pytest.mark.parametrize("length", [0, 1])
def test_a_header_too_short_for_json_is_refused(length):
    refused(length.to_bytes(8, "little") + b"{}", "does not begin with|not valid JSON")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b' {"a": 1}', "begin with"),
        (b"[]        ", "begin with"),
        (b'{"a": NaN}', "not that of a safetensors"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a"' + b":[" * 10, "not valid JSON"),
        (b'{"a":' + b"[" * 100_000, "not valid JSON"),
        (b'{"a":' + b"9" * 10_000 + b"}", "not valid JSON"),
        (json.dumps({"a": {}}).encode("utf-16-le"), "not valid JSON"),
        (b'{"__metadata__": {"step": 3}}', "Expected `str`"),
        (b'{"__metadata__": [1, 2, 3]}', "not that of a safetensors"),
    ],
)
def test_what_is_not_a_json_object_of_entries_is_refused(text, match):
    refused(raw_shard(text), match)


def test_a_name_given_twice_is_refused():
    text = json.dumps({"a": entry(0, 2), "B": entry(0, 2)}).replace("B", "a").encode()
    refused(raw_shard(text, b"aa"), "'a' is given twice")


def test_a_field_given_twice_is_refused():
    text = b'{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}'
    refused(raw_shard(text, b"aa"), "'dtype' is given twice")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "F128"}, "'F128' is not one of"),
        ({"dtype": 5}, "Expected `str`"),
        ({"shape": [True, 2]}, "Expected `int`"),
        ({"shape": [-2, -1]}, "Expected `int` >= 0"),
        ({"shape": ["2"]}, "Expected `int`"),
        ({"shape": [1] * 65}, "length <= 64"),
        ({"shape": [1 << 62, 1 << 62]}, "not possible"),
        ({"shape": [1 << 61, 1 << 61, 1 << 61]}, "2 bytes, but"),
        ({"shape": [3]}, r"2 bytes, but U8\[3\] needs 3"),
        ({"dtype": "F4", "shape": [3]}, "whole bytes"),
        ({"data_offsets": [2, 0]}, "starts at byte 2"),
        ({"data_offsets": [1, 3]}, "starts at byte 1"),
        ({"data_offsets": [0]}, "length 2"),
        ({"data_offsets": [0, 1 << 64]}, "9223372036854775807"),
        ({"extra": 1}, "unknown field"),
    ],
)
def test_a_wrong_entry_is_refused(change, match):
    refused(raw_shard({"a": entry(0, 2) | change}, b"aa"), match)


def test_a_missing_field_is_refused():
    refused(raw_shard({"a": {"dtype": "U8", "shape": [2]}}, b"aa"), "data_offsets")


def test_a_hole_is_refused():
    refused(raw_shard({"a": entry(0, 2), "b": entry(3, 5)}, b"aa-bb"), "'b' starts at byte 3 .* where 2")


def test_an_overlap_is_refused():
    refused(raw_shard({"a": entry(0, 3), "b": entry(2, 5)}, b"aabbb"), "'b' starts at byte 2 .* where 3")


def test_case_72_a_lone_surrogate_in_a_name_is_refused_on_reading():
    refused(raw_shard(b'{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"aa"), "surrogate")


def test_a_file_is_read_by_path_and_errors_name_it(tmp_path):
    path = str(tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes(GOOD)
    assert list(read_header(path).tensors) == ["a", "b"]
    (tmp_path / "x.safetensors").write_bytes(GOOD + b"\0")
    with pytest.raises(BadShard, match=r"x\.safetensors: the tensors end"):
        read_header(path)


def test_an_open_file_is_called_by_the_name_given():
    with pytest.raises(BadShard, match=r"^data/m\.safetensors: truncated"):
        read_header(MemoryReader(GOOD[:20]), name="data/m.safetensors")


def test_case_86_a_folder_a_missing_file_and_an_empty_file_are_named(tmp_path):
    with pytest.raises(BadShard, match=r"expected a safetensors file, but it is a folder"):
        read_header(str(tmp_path))
    with pytest.raises(BadShard, match=r"gone\.safetensors: expected .* No such file"):
        read_header(str(tmp_path / "gone.safetensors"))
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(BadShard, match=r"empty\.safetensors: a file of 0 bytes"):
        read_header(str(tmp_path / "empty.safetensors"))


def test_a_pipe_does_not_hang_the_reader(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(BadShard, match="not a regular file"):
        read_header(str(tmp_path / "x.safetensors"))


def test_case_85_a_symbolic_link_is_not_followed_unless_asked_to(tmp_path):
    (tmp_path / "real").write_bytes(GOOD)
    link = tmp_path / "x.safetensors"
    link.symlink_to("real")
    with pytest.raises(BadShard, match="symbolic link"):
        read_header(str(link))
    assert list(read_header(str(link), follow_symlinks=True).tensors) == ["a", "b"]


def test_case_38_a_file_that_may_not_be_read_is_denied_not_missing(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")  # root, as in many containers, may read everything

    monkeypatch.setattr("os.open", denied)
    with pytest.raises(StoreDenied, match=r"x\.safetensors: .* may not be read"):
        read_header(str(tmp_path / "x.safetensors"))


def test_an_error_of_the_disk_is_the_stores(tmp_path, monkeypatch):
    (tmp_path / "x.safetensors").write_bytes(GOOD)

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.preadv", broken)
    with pytest.raises(StoreError, match=r"x\.safetensors: cannot be read from byte 0 on: Input/output"):
        read_header(str(tmp_path / "x.safetensors"))


def test_readers_leave_no_descriptor_open(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(GOOD[:-1])
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / "bad.safetensors"):
        with pytest.raises(BadShard):
            read_header(str(path))
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_bad_shard(data):
    _read_any(data)


@given(st.data())
def test_any_damage_to_a_good_file_is_a_header_or_a_bad_shard(data):
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    _read_any(bytes(damaged))


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([*DTYPE_BITS]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS]) | _junk,
        "shape": st.lists(st.integers(0, 4), max_size=3) | _junk,
    },
    optional={"data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2) | _junk, "more": _junk},
)


@given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), _entries | _junk, max_size=4), st.binary())
def test_any_json_is_a_header_or_a_bad_shard(header, data):
    _read_any(raw_shard(header, data))


def _read_any(data: bytes) -> None:
    reader = MemoryReader(data)
    try:
        header = read_header(reader)
    except BadShard:
        pass
    else:
        assert sum(stored.spec.nbytes for stored in header.tensors.values()) == len(data) - header.data_start
    assert sum(reader.asked) <= len(data)


def _track(*specs: TensorSpec) -> tuple[FileEntry, Track]:
    plan = ShardPlan("m.safetensors", specs)
    size = len(header_bytes(plan)) + plan.nbytes
    file = FileEntry(name="m.safetensors", size=size, digest="")
    entries = [TensorEntry(name=s.name, dtype=s.dtype, shape=s.shape, digest="", file=file.name) for s in specs]
    return file, Track(files=(file,), tensors=tuple(entries))


def _header_of(*specs: TensorSpec):
    plan = ShardPlan("m.safetensors", specs)
    return read_header(MemoryReader(header_bytes(plan) + bytes(plan.nbytes)))


def test_a_header_that_is_the_manifests_passes():
    specs = [spec("a", 2), spec("b", 3, dtype="F32")]
    check_header(_header_of(*specs), *_track(*specs))


@pytest.mark.parametrize(
    ("found", "listed", "match"),
    [
        ([spec("a", 2)], [spec("a", 2), spec("b", 0)], "lacks 'b'"),
        ([spec("a", 2), spec("b", 0), spec("c", 0)], [spec("a", 2)], "holds 'b', 'c', not in the manifest"),
        ([spec("a", 2)], [spec("a", 2, dtype="F16")], r"'a' is BF16\[2\], where the manifest says F16\[2\]"),
        ([spec("a", 2, 3)], [spec("a", 3, 2)], r"'a' is BF16\[2, 3\], where the manifest says BF16\[3, 2\]"),
        ([spec("a", 2)], [spec("a", 3)], "where the manifest says 4102"),
    ],
)
def test_a_header_that_differs_from_the_manifest_is_refused(found, listed, match):
    with pytest.raises(BadShard, match=match):
        check_header(_header_of(*found), *_track(*listed))
