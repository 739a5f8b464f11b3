from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import BadShard
from ckptsync.shards.index import index_bytes, read_index
from ckptsync.shards.plan import plan_shards

from .files import spec


def test_the_index_maps_sorted_names_and_sums_the_bytes():
    plans = plan_shards([spec("b.w", 10), spec("a.w", 5)], max_bytes=20)
    index = json.loads(index_bytes(plans))
    assert index["metadata"] == {"total_size": 30}
    assert list(index["weight_map"].items()) == [
        ("a.w", "model-00002-of-00002.safetensors"),
        ("b.w", "model-00001-of-00002.safetensors"),
    ]


def test_one_shard_has_an_index_too():
    data = index_bytes(plan_shards([spec("a.w", 5)]))
    assert read_index(data) == {"a.w": "model-00001-of-00001.safetensors"}


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a/b", "x\0", "C:\\x", "..", "", "\ud800", "x" * 300])
def test_case_84_a_file_name_that_leaves_the_folder_is_refused(file):
    with pytest.raises(BadShard, match="name"):
        read_index(json.dumps({"weight_map": {"a": "ok.safetensors", "b": file}}).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
    ],
)
def test_an_index_that_is_none_is_refused(data):
    with pytest.raises(BadShard, match=r"model\.safetensors\.index\.json"):
        read_index(data)


def test_an_index_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr("ckptsync.shards.index.MAX_INDEX", 10)
    with pytest.raises(BadShard, match="more than 10"):
        read_index(b'{"weight_map": {}}')


@given(st.binary(max_size=100))
def test_any_bytes_are_an_index_or_a_bad_shard(data):
    with contextlib.suppress(BadShard):
        assert isinstance(read_index(data), dict)
