from __future__ import annotations

import threading

import pytest

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
        lambda index, part: go_on.wait(20) and None,
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
    blocked.join(20)
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
