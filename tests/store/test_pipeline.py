from __future__ import annotations

import gc
import threading
import weakref

import pytest

from ckptsync.store import LocalStore
from ckptsync.store.direct import aligned
from ckptsync.store.pipeline import Pipeline


def collecting(part_size: int, workers: int) -> tuple[Pipeline, dict[int, bytes]]:
    parts: dict[int, bytes] = {}
    sink = lambda index, part: parts.__setitem__(index, bytes(part))  # noqa: E731
    return Pipeline(sink, part_size=part_size, workers=workers, allocate=aligned), parts


@pytest.mark.parametrize("step", [1, 3, 4, 10, 100])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 4, 5, 8, 41])
def test_parts_are_full_and_in_their_places_and_the_last_is_left_over(step: int, workers: int, size: int) -> None:
    pipeline, parts = collecting(4, workers)
    data = bytes(range(size))
    for start in range(0, size, step):
        pipeline.write(data[start : start + step])
    index, tail = pipeline.finish()
    assert sorted(parts) == list(range(index))
    assert {len(part) for part in parts.values()} <= {4}
    assert b"".join(parts[n] for n in range(index)) + tail == data
    assert size == 0 or len(tail) > 0


def test_writing_goes_on_while_a_part_is_on_the_way_and_waits_when_all_are() -> None:
    go_on = threading.Event()
    buffers = []
    pipeline = Pipeline(
        lambda index, part: go_on.wait(60) and None,
        part_size=4,
        workers=2,
        allocate=lambda size: buffers.append(size) or aligned(size),
    )
    pipeline.write(bytes(12))
    blocked = threading.Thread(target=pipeline.write, args=(bytes(1),))
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    assert buffers == [4, 4, 4]
    go_on.set()
    blocked.join(60)
    pipeline.write(bytes(100))
    pipeline.finish()
    assert buffers == [4, 4, 4]


def test_an_error_of_the_sink_comes_out_and_no_thread_is_left() -> None:
    def sink(index: int, part: memoryview) -> None:
        raise OSError(28, "full")

    pipeline = Pipeline(sink, part_size=4, workers=2, allocate=aligned)
    with pytest.raises(OSError, match="full"):
        pipeline.write(bytes(100))
    pipeline.cancel()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptsync-write")]


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_its_buffers_are_free_once_it_ends_and_not_only_when_it_is_collected(end: str) -> None:
    buffers: list[weakref.ref[object]] = []

    def allocate(size: int) -> memoryview:
        buffer = aligned(size)
        buffers.append(weakref.ref(buffer.obj))
        return buffer

    pipeline = Pipeline(lambda index, part: None, part_size=4, workers=2, allocate=allocate)
    pipeline.write(bytes(101))
    getattr(pipeline, end)()
    assert buffers
    assert [buffer() for buffer in buffers if buffer() is not None] == []
    assert pipeline is not None


def test_many_files_cost_no_more_memory_than_one_without_the_cyclic_collection(tmp_path) -> None:
    """8 MiB of each 8 MiB file stayed, as a writer and its pipeline hold each other."""
    store, data = LocalStore(str(tmp_path)), bytes(1 << 20)

    def write(number: int) -> None:
        writer = store.write(f"file{number}")
        for _ in range(3):
            writer.write(data)
        writer.commit() if number % 2 else writer.abort()
        store.delete(f"file{number}")

    gc.collect()
    gc.disable()
    try:
        write(0)
        write(1)
        before = resident()
        for number in range(50):
            write(number)
        assert resident() - before < 20 << 20, "of 150 MiB"
    finally:
        gc.enable()


def resident() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


def test_a_small_file_takes_a_small_buffer_which_grows_to_a_part_with_what_it_holds() -> None:
    sizes: list[int] = []
    parts: dict[int, bytes] = {}
    pipeline = Pipeline(
        lambda index, part: parts.__setitem__(index, bytes(part)),
        part_size=1 << 20,
        workers=1,
        allocate=lambda size: sizes.append(size) or aligned(size),
    )
    pipeline.write(b"head")
    assert sizes == [64 << 10]
    pipeline.write(bytes(range(256)) * (5 << 10))
    assert sizes == [64 << 10, 1 << 20, 1 << 20]
    index, tail = pipeline.finish()
    assert (index, parts[0] + tail) == (1, b"head" + bytes(range(256)) * (5 << 10))
