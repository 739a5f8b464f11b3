"""The encoder on the device writes what the one on the host writes, to the byte. Here the device is a CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptsync.delta import codec
from ckptsync.delta.device import DeviceBaseline, groups
from ckptsync.testing.strategies import changes

from .updates import adam_like

BLOCK = 8192
CHUNK = 3 * BLOCK
"""Small, so that a short tensor has several blocks, and several lines."""

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
EFFORTS = ("fast", "best")

Update = tuple[int, bytes, bytes]


def tensor(data: bytes, size: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(DTYPES[size])


@settings(max_examples=20)
@given(st.lists(changes(most=20_000), min_size=1, max_size=3), st.sampled_from(EFFORTS))
def test_any_update_is_encoded_as_on_the_host(updates: list[Update], effort: codec.Effort) -> None:
    old = {str(at): tensor(before, size) for at, (size, before, _) in enumerate(updates)}
    new = {str(at): tensor(after, size) for at, (size, _, after) in enumerate(updates)}
    found = DeviceBaseline(old, block=BLOCK, chunk=CHUNK).encode(new, effort=effort).blobs
    for at, (size, before, after) in enumerate(updates):
        assert found.get(str(at)) == codec.encode(before, after, size, effort=effort, block=BLOCK)


@pytest.mark.parametrize(
    ("density", "effort"), [(0.001, "best"), (0.01, "fast"), (0.2, "best"), (0.45, "fast"), (0.9, "best")]
)
def test_weights_are_encoded_as_on_the_host(density: float, effort: codec.Effort) -> None:
    old, new = adam_like(150_000, density)
    baseline = DeviceBaseline({"w": torch.from_numpy(old)}, block=1 << 16)
    baseline.prepare()
    blobs = baseline.encode({"w": torch.from_numpy(new)}, effort=effort).blobs
    assert blobs["w"] == codec.encode(old.tobytes(), new.tobytes(), 2, effort=effort, block=1 << 16)


def test_the_baseline_moves_when_it_is_told_to_and_not_before() -> None:
    versions = [torch.from_numpy(adam_like(30_000, 0.05, seed)[0]) for seed in range(3)]
    baseline = DeviceBaseline({"w": versions[0]}, block=BLOCK, chunk=CHUNK)
    baseline.encode({"w": versions[1]})  # it was not committed
    baseline.move(baseline.encode({"w": versions[1]}))
    baseline.prepare()
    found = baseline.encode({"w": versions[2]}).blobs["w"]
    assert found == codec.encode(versions[1].numpy().tobytes(), versions[2].numpy().tobytes(), 2, block=BLOCK)


@pytest.mark.parametrize("effort", EFFORTS)
def test_runs_that_are_packed_side_by_side_make_the_same_blobs(
    effort: codec.Effort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that lie in several runs, and in one; some small, some dense, one that did not change."""
    monkeypatch.setattr(groups, "AT_ONCE", 500)
    monkeypatch.setattr(groups, "CLASSED", 500)
    pairs = [
        adam_like(size, density, size) for size, density in [(100_000, 0.01), (7, 0.5), (40_000, 0.6), (9_000, 0.05)]
    ]
    old = {str(at): torch.from_numpy(pair[0]) for at, pair in enumerate(pairs)} | {"same": torch.ones(20_000)}
    new = {str(at): torch.from_numpy(pair[1]) for at, pair in enumerate(pairs)} | {"same": torch.ones(20_000)}
    with ThreadPoolExecutor(3) as pool:
        found = DeviceBaseline(old, block=BLOCK).encode(new, effort=effort, pool=pool).blobs
    assert found.keys() == {"0", "1", "2", "3"}
    for name, blob in found.items():
        before, after = (each[name].numpy().tobytes() for each in (old, new))
        assert blob == codec.encode(before, after, 2, effort=effort, block=BLOCK)
