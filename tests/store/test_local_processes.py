"""A folder with several writers: what the dead left behind, and who wins."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from ckptsync.store import LocalStore, direct, put_bytes, read_bytes
from ckptsync.store.paths import temporary_name

from .folders import files_on_disk, names
from .races import won_by_two

CHUNK = direct.CHUNK


@pytest.fixture
def store(tmp_path: pathlib.Path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"), deadline=0.2)


# Debris


def test_case_17_temporary_files_are_never_listed(store: LocalStore) -> None:
    store.write("data/v1/shard.bin").write(b"x")
    assert len(files_on_disk(store)) == 1
    assert names(store) == []


def test_case_17_temporary_files_of_the_dead_are_swept_after_the_grace_time(store: LocalStore) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", f"""
import os
from ckptsync.store import LocalStore
writer = LocalStore({store.url!r}).write("data/v1/shard.bin")
writer.write(bytes({CHUNK * 2}))
os.kill(os.getpid(), 9)
"""],
        check=False,
    )  # fmt: skip
    assert killed.returncode == -9
    mine = store.write("data/v1/other.bin")
    assert len(files_on_disk(store)) == 2
    assert store.sweep("data", grace=3600) == 0
    for name in files_on_disk(store):
        os.utime(f"{store.url}/data/v1/{name}", (0, 0))
    assert store.sweep("data", grace=3600) == 1
    mine.commit()
    assert files_on_disk(store) == ["other.bin"]


def test_case_17_a_temporary_file_of_another_host_is_swept_by_its_age_alone(store: LocalStore) -> None:
    put_bytes(store, "data/v1/shard.bin", b"x")
    name = temporary_name().split(".")
    debris = f"{store.url}/data/v1/.ckptsync-tmp.elsewhere.{name[-2]}.{name[-1]}"
    with open(debris, "w"):
        assert store.sweep("", grace=60) == 0
        os.utime(debris, (0, 0))
    assert store.sweep("", grace=60) == 1
    assert names(store) == ["data/v1/shard.bin"]


def test_case_45_two_writers_of_one_path_do_not_share_a_temporary_file(store: LocalStore) -> None:
    one, two = store.write("head.json"), store.write("head.json")
    one.write(b'{"one": 1}')
    two.write(b"{}")
    two.commit()
    one.commit()
    assert read_bytes(store, "head.json", 100) == b'{"one": 1}'
    assert files_on_disk(store) == ["head.json"]


def test_deleting_the_last_file_of_an_attempt_takes_its_folder_too(store: LocalStore) -> None:
    put_bytes(store, "data/v1/model/a", b"x")
    put_bytes(store, "data/v1/b", b"x")
    store.delete("data/v1/model/a")
    assert os.listdir(f"{store.url}/data/v1") == ["b"]
    store.delete("data/v1/b")
    assert os.listdir(store.url) == ["data"]


def test_a_folder_pruned_by_another_process_is_made_again(store: LocalStore) -> None:
    put_bytes(store, "data/v1/a", b"x")
    LocalStore(store.url).delete("data/v1/a")
    put_bytes(store, "data/v1/b", b"x")
    assert names(store) == ["data/v1/b"]


# Several processes


def test_of_two_processes_that_create_one_name_one_wins(store: LocalStore) -> None:
    assert won_by_two(store.url, {}, 50) == 50
    assert len(names(store)) == 50


@pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "as torch allocates"])
def test_pieces_of_any_alignment_and_order_come_back_byte_for_byte(store: LocalStore, shift: int) -> None:
    memory = direct.aligned(40 << 20)
    memory[:] = os.urandom(1 << 20) * 40
    pieces = [memory[shift : shift + size] for size in (4096, 3 << 20, 100, 5 << 20, (17 << 20) + 8, 1, 20 << 20)]
    pieces += [memory[: 4096 * 7], memory[: 18 << 20], memoryview(bytes(memory[: 2 << 20]))]
    writer = store.write("file")
    for piece in pieces:
        writer.write(piece)
    writer.commit()
    with open(os.path.join(store.url, "file"), "rb") as file:
        assert file.read() == b"".join(pieces)


def test_a_large_aligned_piece_is_written_from_where_it_lies(store: LocalStore, monkeypatch) -> None:
    seen: list[int] = []
    write_all = direct.write_all
    monkeypatch.setattr(direct, "write_all", lambda fd, part, at: (seen.append(len(part)), write_all(fd, part, at))[1])
    memory = direct.aligned(8 << 20)
    writer = store.write("file")
    writer.write(memory[:4096])
    writer.write(memory)
    writer.commit()
    assert seen == [4096, 8 << 20, 0]
