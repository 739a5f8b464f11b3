from __future__ import annotations

import threading

import pytest

from ckptsync.digest import digest
from ckptsync.errors import DuplicateName, InvalidInput, InvalidName, StoreFull
from ckptsync.shards.plan import ShardPlan, plan_shards
from ckptsync.shards.read import read_header
from ckptsync.shards.write import PAGE, ShardWriter, header_bytes

from .files import MemoryReader, MemoryWriter, spec

PLAN = ShardPlan("model-00001-of-00001.safetensors", (spec("a.w", 3), spec("b.w", 0, 5), spec("c.w", dtype="F64")))


def written(metadata: dict | None = None, algorithm: str = "xxh3-128") -> tuple:
    store = MemoryWriter()
    writer = ShardWriter(store, PLAN, metadata=metadata or {}, algorithm=algorithm)
    writer.add("a.w", b"aaaaaa")
    writer.add("b.w", b"")
    writer.add("c.w", bytearray(b"cccccccc"))
    return store, *writer.finish()


def test_a_shard_reads_back_as_it_was_planned():
    store, _, _ = written({"step": "3"})
    header = read_header(MemoryReader(store.visible))
    assert [stored.spec for stored in header.tensors.values()] == list(PLAN.tensors)
    assert header.metadata == {"format": "pt", "step": "3"}
    at = header.tensors["c.w"].offset
    assert store.visible[at : at + 8] == b"cccccccc"


def test_the_data_starts_at_a_page():
    for count in (1, 40, 200):
        plan = ShardPlan("x.safetensors", tuple(spec(f"layers.{i}.w", 1) for i in range(count)))
        assert len(header_bytes(plan)) % PAGE == 0


@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3"])
def test_digests_are_over_the_bytes_that_were_written(algorithm):
    store, file, entries = written(algorithm=algorithm)
    assert (file.name, file.size) == (PLAN.file, len(store.visible))
    assert file.digest == digest(store.visible, algorithm)
    assert [entry.digest for entry in entries] == [digest(d, algorithm) for d in (b"aaaaaa", b"", b"cccccccc")]
    assert {entry.file for entry in entries} == {PLAN.file}
    assert [entry.spec for entry in entries] == list(PLAN.tensors)


def test_a_tensor_larger_than_a_chunk_is_digested_whole():
    data = bytes(range(256)) * (10 << 12)
    (plan,) = plan_shards([spec("a", len(data), dtype="U8")])
    store = MemoryWriter()
    writer = ShardWriter(store, plan)
    writer.add("a", data)
    file, (entry,) = writer.finish()
    assert entry.digest == digest(data)
    assert file.digest == digest(store.visible)
    assert store.visible.endswith(data)


def test_small_tensors_wake_no_thread_and_large_ones_are_digested_beside_the_write():
    plan = plan_shards([spec("norm", 1 << 10, dtype="U8"), spec("matrix", 1 << 20, dtype="U8")])[0]
    writer = ShardWriter(MemoryWriter(), plan)
    digesting = lambda: [each for each in threading.enumerate() if each.name.startswith("ckptsync-digest")]  # noqa: E731
    before = len(digesting())
    for each in plan.tensors:
        large = each.nbytes > 1 << 18
        writer.add(each.name, bytes(each.nbytes))
        assert (len(digesting()) > before) == large
    writer.finish()


def test_nothing_is_visible_before_finish():
    store = MemoryWriter()
    writer = ShardWriter(store, PLAN)
    writer.add("a.w", b"aaaaaa")
    assert store.visible is None
    writer.abort()
    assert store.aborted
    assert store.visible is None


def test_tensors_out_of_order_are_refused():
    writer = ShardWriter(MemoryWriter(), PLAN)
    with pytest.raises(InvalidInput, match=r"'a\.w' comes next in the plan, not 'c\.w'"):
        writer.add("c.w", b"cccccccc")


def test_a_tensor_of_another_size_is_refused():
    writer = ShardWriter(MemoryWriter(), PLAN)
    with pytest.raises(InvalidInput, match=r"'a\.w' has 7 bytes, but BF16\[3\] has 6"):
        writer.add("a.w", b"aaaaaaa")


def test_a_tensor_after_the_last_is_refused():
    store, plan = MemoryWriter(), ShardPlan("x.safetensors", (spec("a", 1),))
    writer = ShardWriter(store, plan)
    writer.add("a", b"aa")
    with pytest.raises(InvalidInput, match="'b' is not in its plan"):
        writer.add("b", b"bb")


def test_an_unfinished_shard_is_never_committed():
    store = MemoryWriter()
    writer = ShardWriter(store, PLAN)
    writer.add("a.w", b"aaaaaa")
    with pytest.raises(InvalidInput, match=r"2 tensors missing, from 'b\.w' on"):
        writer.finish()
    assert store.visible is None


@pytest.mark.parametrize("metadata", [{"step": 3}, {3: "step"}, {"a": None}, {"a": "\ud800"}])
def test_case_72_metadata_that_is_not_text_is_refused_before_the_first_byte(metadata):
    store = MemoryWriter()
    with pytest.raises(InvalidInput, match="metadata"):
        ShardWriter(store, PLAN, metadata=metadata)
    assert not store.data


@pytest.mark.parametrize(
    ("specs", "error"),
    [
        ([spec("__metadata__", 1)], InvalidName),
        ([spec("\udfff", 1)], InvalidName),
        ([spec("a", 1), spec("a", 1)], DuplicateName),
    ],
)
def test_case_72_a_plan_made_by_hand_is_checked_before_the_first_byte(specs, error):
    store = MemoryWriter()
    with pytest.raises(error):
        ShardWriter(store, ShardPlan("x.safetensors", tuple(specs)))
    assert not store.data


def test_case_73_a_header_that_no_reader_takes_is_refused_before_the_first_byte(monkeypatch):
    monkeypatch.setattr("ckptsync.shards.write.MAX_HEADER", 4096)
    store = MemoryWriter()
    with pytest.raises(InvalidInput, match="header of"):
        ShardWriter(store, PLAN, metadata={"note": "x" * 5000})
    assert not store.data


def test_names_of_any_text_survive():
    odd = ["", "ключ", 'a"b\\c', "tab\tnew\nline", "\x00", "😀"]
    plan = ShardPlan("x.safetensors", tuple(spec(name, 0) for name in odd))
    assert list(read_header(MemoryReader(header_bytes(plan))).tensors) == odd


def test_an_error_of_the_store_comes_out_as_it_is():
    class Full(MemoryWriter):
        def write(self, data):
            raise StoreFull("no space left")

    with pytest.raises(StoreFull):
        ShardWriter(Full(), PLAN)
