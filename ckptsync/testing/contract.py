"""What `store.base` promises, as tests that any store can be put to.

    from ckptsync.testing.contract import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def root(self, tmp_path):
            url = f"myfs://{tmp_path}"
            return lambda: open_store(url)

One process and one machine are asked; what two clients see of each other, on a mount or over a gateway, is found out
by `ckptsync doctor ROOT --full`. Needs `ckptsync[testing]`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..errors import AlreadyExists, BadShard, InvalidInput, InvalidName, NotFound
from ..store import Store, enforces_create, put_bytes, read_bytes
from .extra import needed

with needed("pytest"):
    import pytest

Root = Callable[[], Store]


def names(store: Store, folder: str) -> list[str]:
    return sorted(entry.path for entry in store.list(folder))


class StoreContract:
    """Subclass it, with a fixture `root` there or in conftest.py: a function that opens the same empty root again and
    again, each time as another client would, with nothing remembered. Numbers in names are those of
    `docs/conformance.md`."""

    @pytest.fixture
    def store(self, root: Root) -> Store:
        return root()

    def test_case_42_a_file_is_visible_only_after_its_commit_and_at_once_then(self, root: Root) -> None:
        writer = root().write("data/a/shard.bin")
        writer.write(b"x" * 100)
        reader = root()
        assert names(reader, "data") == []
        with pytest.raises(NotFound):
            reader.open("data/a/shard.bin")
        writer.commit()
        assert names(reader, "data") == ["data/a/shard.bin"]
        assert read_bytes(reader, "data/a/shard.bin", 100) == b"x" * 100

    def test_a_large_file_is_visible_only_after_its_commit(self, root: Root) -> None:
        writer = root().write("data/shard.bin")
        for _ in range(5):
            writer.write(bytes(8 << 20))
        assert names(root(), "data") == []
        writer.commit()
        assert [entry.size for entry in root().list("data")] == [40 << 20]

    @pytest.mark.parametrize("size", [0, 10, 40 << 20])
    def test_an_aborted_file_leaves_nothing(self, root: Root, size: int) -> None:
        writer = root().write("data/a/shard.bin")
        writer.write(bytes(size))
        writer.abort()
        writer.abort()
        assert names(root(), "") == []
        with pytest.raises(NotFound):
            root().open("data/a/shard.bin")

    def test_aborting_a_rewrite_keeps_what_was_there(self, root: Root) -> None:
        put_bytes(root(), "head.json", b"old")
        writer = root().write("head.json")
        writer.write(b"new")
        writer.abort()
        assert read_bytes(root(), "head.json", 10) == b"old"

    def test_a_rewrite_replaces_what_was_there_for_every_client(self, root: Root) -> None:
        other = root()
        for text in (b"one", b"three", b"x"):
            put_bytes(root(), "head.json", text)
            assert read_bytes(other, "head.json", 10) == text
            assert [(entry.path, entry.size) for entry in other.list("")] == [("head.json", len(text))]

    def test_case_41_a_client_that_listed_before_sees_what_another_wrote_since(self, root: Root) -> None:
        """Cases 41 and 42: listing caches hid this for days."""
        reader, writer = root(), root()
        assert names(reader, "manifests") == []
        for number in range(3):
            put_bytes(writer, f"manifests/v{number}", b"x")
            expected = [f"manifests/v{n}" for n in range(number + 1)]
            assert names(reader, "manifests") == names(writer, "manifests") == expected
            assert read_bytes(reader, f"manifests/v{number}", 10) == b"x"
        writer.delete("manifests/v0")
        assert names(reader, "manifests") == ["manifests/v1", "manifests/v2"]

    def test_a_listing_is_of_whole_folders_at_any_depth(self, store: Store) -> None:
        for path in ("a/x", "a/b/c/y", "ab/z", "top"):
            put_bytes(store, path, path.encode())
        assert names(store, "a") == ["a/b/c/y", "a/x"]
        assert names(store, "a/b") == ["a/b/c/y"]
        assert names(store, "") == ["a/b/c/y", "a/x", "ab/z", "top"]
        assert names(store, "absent") == []
        assert {entry.path: entry.size for entry in store.list("a")} == {"a/x": 3, "a/b/c/y": 7}

    def test_a_listing_of_more_than_one_page(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda n: put_bytes(store, f"manifests/{n:05d}", b"x"), range(1005)))
        assert names(store, "manifests") == [f"manifests/{n:05d}" for n in range(1005)]

    def test_the_time_in_a_listing_is_that_of_the_write(self, store: Store) -> None:
        """By the store's clock, which is taken to be within a minute of ours. 0: the store tells none."""
        put_bytes(store, "file", b"x")
        (entry,) = store.list("")
        assert entry.modified == 0 or abs(entry.modified - time.time()) < 60

    def test_create_refuses_a_name_that_is_taken(self, root: Root) -> None:
        root().create("manifests/v1.json", b"first")
        with pytest.raises(AlreadyExists, match=r"manifests/v1\.json"):
            root().create("manifests/v1.json", b"second")
        assert read_bytes(root(), "manifests/v1.json", 10) == b"first"
        assert names(root(), "") == ["manifests/v1.json"]

    def test_of_16_threads_that_create_one_name_one_wins(self, root: Root) -> None:
        start = threading.Barrier(16)

        def create(number: int) -> bool:
            store = root()
            start.wait()
            try:
                store.create("epochs/e1", f"{number}".encode())
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(16) as threads:
            won = list(threads.map(create, range(16)))
        assert won.count(True) == 1
        assert read_bytes(root(), "epochs/e1", 10) == f"{won.index(True)}".encode()

    def test_an_empty_create_is_refused(self, store: Store) -> None:
        with pytest.raises(InvalidInput, match="empty"):
            store.create("lock", b"")

    def test_the_probe_finds_create_enforced_and_leaves_nothing(self, store: Store) -> None:
        assert enforces_create(store)
        assert names(store, "") == []

    @pytest.mark.parametrize("size", [1, 4095, 4096, (16 << 20) - 1, 16 << 20, (64 << 20) + 4097])
    def test_files_of_all_sizes_come_back_byte_for_byte(self, store: Store, size: int) -> None:
        block = os.urandom(1 << 20)
        data = memoryview((block * (size // len(block) + 1))[:size])
        writer = store.write("data/shard.bin")
        for start in range(0, size, (7 << 20) + 13):
            writer.write(data[start : start + (7 << 20) + 13])
        writer.commit()
        assert [entry.size for entry in store.list("data")] == [size]
        reader = store.open("data/shard.bin")
        buffer = bytearray(reader.size)
        reader.readinto(0, memoryview(buffer))
        reader.close()
        assert hashlib.sha256(buffer).digest() == hashlib.sha256(data).digest()

    def test_the_writer_has_taken_the_bytes_when_write_returns(self, store: Store) -> None:
        writer = store.write("file")
        reused = bytearray(b"a" * (17 << 20))
        writer.write(reused)
        reused[:] = b"b" * len(reused)
        writer.write(reused)
        writer.commit()
        reader = store.open("file")
        both = bytearray(reader.size)
        reader.readinto(0, memoryview(both))
        assert both == b"a" * len(reused) + b"b" * len(reused)

    def test_a_writer_takes_any_contiguous_buffer(self, store: Store) -> None:
        writer = store.write("file")
        for data in (b"ab", bytearray(b"cd"), memoryview(b"efgh").cast("H"), memoryview(b""), memoryview(b"ij")):
            writer.write(data)
        writer.commit()
        assert read_bytes(store, "file", 100) == b"abcdefghij"

    def test_an_empty_file_is_a_file_of_size_0(self, store: Store) -> None:
        """Case 86."""
        put_bytes(store, "merges.txt", b"")
        assert [tuple(entry)[:2] for entry in store.list("")] == [("merges.txt", 0)]
        assert read_bytes(store, "merges.txt", 10) == b""
        with pytest.raises(BadShard, match="merges"):
            store.open("merges.txt").readinto(0, memoryview(bytearray(1)))

    def test_several_threads_read_one_file(self, store: Store) -> None:
        data = os.urandom(1 << 20) * 20
        put_bytes(store, "file", data)
        reader = store.open("file")
        buffer = bytearray(len(data))
        step = (1 << 20) + 4096
        with ThreadPoolExecutor(4) as threads:
            parts = [(at, memoryview(buffer)[at : at + step]) for at in range(0, len(data), step)]
            list(threads.map(lambda part: reader.readinto(*part), parts))
        reader.close()
        assert buffer == data

    @pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (50, 51), (1000, 1), (-1, 1)])
    def test_reading_past_the_end_is_refused(self, store: Store, offset: int, length: int) -> None:
        put_bytes(store, "file", bytes(100))
        with pytest.raises(BadShard):
            store.open("file").readinto(offset, memoryview(bytearray(length)))

    def test_reading_nothing_is_fine(self, store: Store) -> None:
        put_bytes(store, "file", b"abc")
        store.open("file").readinto(3, memoryview(bytearray()))

    def test_deleting_what_is_not_there_is_success(self, store: Store) -> None:
        store.delete("data/a/file")
        put_bytes(store, "data/a/file", b"x")
        store.delete("data/a/file")
        store.delete("data/a/file")
        assert names(store, "") == []

    def test_case_86_a_folder_in_place_of_a_file_is_not_found(self, store: Store) -> None:
        put_bytes(store, "data/a/file", b"x")
        with pytest.raises(NotFound, match="data/a"):
            store.open("data/a")

    @pytest.mark.parametrize("path", ["", "/etc/passwd", "a/../b", "..", "a//b", "a/./b", "a\0b", ".ckptsync-tmp.x"])
    def test_paths_that_could_lead_outside_are_refused(self, store: Store, path: str) -> None:
        for call in (store.open, store.write, store.delete, lambda path: store.create(path, b"x")):
            with pytest.raises(InvalidName):
                call(path)
