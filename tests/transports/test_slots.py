"""Which trainer rank exports for which GPU of which engine."""

from __future__ import annotations

import pytest

from ckptsync.errors import TransportError
from ckptsync.transports.slots import Place, plan_slots

GPUS = tuple(f"GPU-{number}" for number in range(8))


def trainers(count, sees=()):
    return [Place("host", GPUS[rank], sees or (GPUS[rank],)) for rank in range(count)]


@pytest.mark.parametrize(
    ("ranks", "sizes", "expected"),
    [
        (1, {"a": 1}, {"a": (0,)}),
        (1, {"a": 2}, {"a": (0, 0)}),
        (2, {"a": 1}, {"a": (0,)}),
        (2, {"a": 2}, {"a": (0, 1)}),
        (2, {"a": 1, "b": 1}, {"a": (0,), "b": (1,)}),
        (8, {"a": 2, "b": 4}, {"a": (0, 1), "b": (2, 3, 4, 5)}),
        (4, {"a": 8}, {"a": (0, 1, 2, 3, 0, 0, 0, 0)}),
    ],
)
def test_each_gpu_of_an_engine_has_one_exporter_whatever_both_parallel_sizes(ranks, sizes, expected):
    slots = plan_slots(sizes, trainers(ranks, GPUS))
    assert {slot.engine: slot.exporter for slot in slots} == expected
    assert all(slot.coordinator == min(slot.exporter) for slot in slots)
    assert len({gpu for slot in slots for gpu in slot.gpus}) == sum(sizes.values())


def test_a_rank_without_an_engine_is_in_no_slot():
    slot = plan_slots({"a": 1}, trainers(2))[0]
    assert slot.gpus_of(1) == []
    assert slot.gpus_of(0) == [GPUS[0]]


def test_gpus_that_were_given_keep_the_order_of_the_engines_ranks():
    slots = plan_slots({"a": 2, "b": 1}, trainers(4), {"a": [GPUS[3], GPUS[1]]})
    assert slots[0].gpus == (GPUS[3], GPUS[1])
    assert slots[0].exporter == (3, 1)
    assert slots[0].coordinator == 1
    assert slots[1].gpus == (GPUS[0],)


def test_an_engine_with_more_ranks_than_gpus_is_refused_with_the_remedy():
    with pytest.raises(TransportError, match="a has 3 ranks, and there are 2 GPUs for them: pass gpus="):
        plan_slots({"a": 3}, trainers(2))


def test_a_gpu_that_no_rank_sees_is_named():
    with pytest.raises(TransportError, match="a runs on the GPU GPU-7, which no trainer rank sees"):
        plan_slots({"a": 1}, trainers(2), {"a": [GPUS[7]]})
