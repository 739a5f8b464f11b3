"""The model of large fleets: that it adds up, that more is never slower, and that it is right where one can reckon."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.scale_sim import GB, Machine, Setup, cost, publishing, share, simulate

MACHINE = Machine()
FLEET = Setup(engines=200, clusters=4, mirrors=(4, 2))


def arrivals(count: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return sorted(rng.uniform(0, 5) for _ in range(count))


@pytest.mark.parametrize("seed", range(5))
def test_every_byte_that_was_asked_for_went_over_the_link(seed: int):
    found = share(arrivals(300, seed), 7 * GB, cap=2 * GB, capacity=100 * GB)
    assert len(found.finished) == 300
    assert found.moved == pytest.approx(300 * 7 * GB)


def test_transfers_that_begin_together_take_as_long_as_their_sum():
    assert share([0.0] * 50, 1e9, cap=1e9, capacity=5e9).finished == pytest.approx([10.0] * 50)


def test_one_transfer_is_as_fast_as_the_slower_of_itself_and_the_link():
    assert share([3.0], 1e9, cap=1e8, capacity=1e9).finished == pytest.approx([13.0])
    assert share([3.0], 1e9, cap=1e9, capacity=1e8).finished == pytest.approx([13.0])


def test_two_that_overlap_share_while_they_do():
    # 2 s alone, then shared: the first has 8 of 10 left at half the rate, the second has what is left alone.
    assert share([0.0, 2.0], 10.0, cap=1.0, capacity=1.0).finished == pytest.approx([18.0, 20.0])


def test_nothing_ends_sooner_on_a_narrower_link():
    begins = arrivals(200)
    wide = share(begins, 1e9, cap=5e8, capacity=2e10).finished
    narrow = share(begins, 1e9, cap=5e8, capacity=1e10).finished
    assert all(a <= b + 1e-9 for a, b in zip(wide, narrow, strict=True))


def test_one_engine_without_a_mirror_takes_what_its_parts_take():
    setup = Setup(engines=1, clusters=1, poll=0.0)
    found = simulate(setup, MACHINE)
    staged = setup.nbytes / min(MACHINE.reads, MACHINE.get_limit * setup.part)
    loaded = setup.nbytes / (MACHINE.load * setup.gpus)
    wait = 5 * MACHINE.latency + 0.5 / MACHINE.get_limit
    assert found.live[0] == pytest.approx(publishing(setup, MACHINE, setup.nbytes) + wait + staged + loaded, abs=1e-3)


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_each_engine_and_each_mirror_reads_the_version_once(kind: str):
    setup = replace(FLEET, kind=kind)
    size = setup.nbytes / (MACHINE.delta_ratio if kind == "delta" else 1.0)
    found = simulate(setup, MACHINE)
    assert len(found.live) == 200
    assert found.read == pytest.approx(size * (200 + 4 + 4 * 2))
    assert found.remote == pytest.approx(size * 4 * 3 / 4), "a mirror of three clusters in four crosses a region"


@pytest.mark.parametrize("better", [
    {"get_limit": 11_000.0}, {"put_limit": 7_000.0}, {"nic": 50 * GB}, {"get_cpu": 0.1}, {"put_cpu": 0.1},
    {"load": 200 * GB}, {"latency": 0.001},
])  # fmt: skip
def test_a_better_machine_is_never_slower(better: dict[str, float]):
    setup = replace(FLEET, poll=0.0)
    now, then = simulate(setup, MACHINE), simulate(setup, replace(MACHINE, **better))
    assert all(a >= b - 1e-6 for a, b in zip(now.live, then.live, strict=True))


def test_all_is_live_after_it_was_published_and_the_last_is_the_worst():
    found = simulate(FLEET, MACHINE)
    assert found.publish < found.arrived < found.at(0.0) <= found.at(0.5) <= found.at(0.99) <= found.live[-1]


def test_a_delta_costs_less_than_a_full_version_in_time_bytes_and_money():
    full, delta = (simulate(replace(FLEET, kind=kind), MACHINE) for kind in ("full", "delta"))
    assert delta.at(0.99) < full.at(0.99)
    assert delta.read < full.read / 100
    assert sum(cost(delta).values()) < sum(cost(full).values())
