"""Every update comes back to the bit, whatever is in it; every damage is found before or by the digests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.delta import codec, compiled, layout, modes, reference
from ckptsync.errors import BadShard
from ckptsync.testing.strategies import changes

from .updates import SIZES, adam_like

EFFORTS = ("fast", "best")
BLOCK = 1024
"""Small, so that a short tensor has several."""


def restored(blob: bytes, old: bytes, size: int) -> bytes:
    image = bytearray(old)
    codec.apply(codec.parse(blob, size, len(old) // size), image)
    return bytes(image)


@given(changes(), st.sampled_from(EFFORTS))
def test_any_update_comes_back_to_the_bit(update: tuple[int, bytes, bytes], effort: codec.Effort) -> None:
    size, old, new = update
    blob = codec.encode(old, new, size, effort=effort, block=BLOCK)
    if blob is None:
        assert old == new
    else:
        assert restored(blob, old, size) == new


@pytest.mark.parametrize("size", SIZES)
def test_ten_thousand_random_updates_come_back_to_the_bit(size: int) -> None:
    rng, full, different = np.random.default_rng(size), (1 << 8 * size) - 1, 0
    for case in range(10_000 // len(SIZES) + 1):
        old = rng.integers(0, full, rng.integers(1, 400), SIZES[size], endpoint=True) >> rng.integers(0, 8 * size)
        amounts = rng.integers(0, full, len(old), SIZES[size], endpoint=True) >> rng.integers(0, 8 * size)
        new = old + amounts * (rng.random(len(old)) < rng.random())
        old, new = old.astype(SIZES[size]).tobytes(), new.astype(SIZES[size]).tobytes()
        blob = codec.encode(old, new, size, effort=EFFORTS[case % 2], block=128)
        assert (blob is None) == (old == new)
        assert restored(blob, old, size) == new if blob else True
        different += blob is not None
    assert different > 3000


@pytest.mark.parametrize("mode", range(7))
@given(update=changes(most=700))
def test_every_mode_carries_any_change(mode: int, update: tuple[int, bytes, bytes]) -> None:
    size, old, new = update
    before, after = codec.as_elements(old, size), codec.as_elements(new, size)
    places, differences = reference.changed(before, after)
    if not len(places):
        return
    payload = modes.encode(mode, before, after, places, differences)
    image = before.copy()
    modes.apply(mode, memoryview(payload), image, len(places))
    assert image.tobytes() == new


@given(changes())
def test_compiled_and_plain_kernels_agree(update: tuple[int, bytes, bytes]) -> None:
    size, old, new = update
    before, after = codec.as_elements(old, size), codec.as_elements(new, size)
    fast, plain = compiled.changed(before, after), reference.changed(before, after)
    assert all(np.array_equal(a, b) for a, b in zip(fast, plain, strict=True))
    places, differences = plain
    parts = reference.write_values(differences)
    assert all(np.array_equal(a, b) for a, b in zip(compiled.write_values(differences), parts, strict=True))
    limits = np.unique(before)[1::7][:3]
    (own, ranks), other = reference.class_ranks(before, places, limits), compiled.class_ranks(before, places, limits)
    assert np.array_equal(own, other[0])
    assert np.array_equal(ranks, other[1])
    assert np.array_equal(compiled.histogram(before, 3), reference.histogram(before, 3))
    digits = reference.write_digits(places)
    assert np.array_equal(compiled.write_digits(places), digits)
    assert np.array_equal(compiled.read_digits(digits, len(places)), reference.read_digits(digits, len(places)))
    counts = np.bincount(own, minlength=len(limits) + 1)
    runs = np.concatenate([ranks[own == index] for index in range(len(limits) + 1)])
    found = [kernel.class_places(before, runs, counts, limits) for kernel in (reference, compiled)]
    assert np.array_equal(*found)
    images = [before.copy(), before.copy()]
    for kernel, image in zip((reference, compiled), images, strict=True):
        assert kernel.add_values(image, places, *parts)
        assert image.tobytes() == new


@given(st.lists(st.integers(0, 255), max_size=200), st.integers(0, 50))
def test_kernels_agree_on_digits_that_are_wrong_too(digits: list[int], count: int) -> None:
    given_digits = np.array(digits, dtype=np.uint8)
    results = [kernel.read_digits(given_digits, count) for kernel in (reference, compiled)]
    assert (results[0] is None) == (results[1] is None)
    if results[0] is not None:
        assert np.array_equal(*results)


@pytest.mark.parametrize("size", SIZES)
def test_special_values_take_the_same_path(size: int) -> None:
    """-0.0, infinities and NaN payloads of every float of this size are just patterns."""
    top = 1 << (8 * size - 1)
    special = [0, top, top - 1, 2 * top - 1, top + 1, top // 2, top | top // 2, 1]
    old = np.array(special * 40, dtype=SIZES[size])
    new = np.array(special[1:] * 40 + special[:1] * 40, dtype=SIZES[size])
    blob = codec.encode(old.tobytes(), new.tobytes(), size, block=64)
    assert blob is not None
    assert restored(blob, old.tobytes(), size) == new.tobytes()


@pytest.mark.parametrize(("density", "effort", "least"), [(0.01, "fast", 150), (0.01, "best", 195), (0.2, "best", 14)])
def test_ratios_are_those_of_the_table(density: float, effort: codec.Effort, least: float) -> None:
    old, new = adam_like(1 << 22, density)
    blob = codec.encode(old.tobytes(), new.tobytes(), 2, effort=effort)
    assert blob is not None
    share = np.mean(old != new) / density  # the step is found on a part of the weights
    assert old.nbytes / len(blob) * share >= least


def test_an_unrelated_tensor_costs_no_more_than_itself() -> None:
    rng = np.random.default_rng(1)
    old, new = (rng.integers(0, 1 << 16, 100_000).astype(np.uint16) for _ in range(2))
    blob = codec.encode(old.tobytes(), new.tobytes(), 2)
    assert blob is not None
    assert len(blob) <= 1.01 * new.nbytes
    assert restored(blob, old.tobytes(), 2) == new.tobytes()


def test_a_delta_is_refused_on_any_other_base_and_leaves_it_alone() -> None:
    old, new = adam_like(5000, 0.05)
    blob = codec.encode(old.tobytes(), new.tobytes(), 2, block=BLOCK)
    assert blob is not None
    other = bytearray(old.tobytes())
    other[4500] ^= 1
    image = bytearray(other)
    with pytest.raises(BadShard, match="block 2 is not of the base"):
        codec.apply(codec.parse(blob, 2, 5000), image)
    assert image[4096:] == other[4096:], "the block that is not the base, and those after it, are untouched"
    with pytest.raises(BadShard, match="where the tensor has 4999"):
        codec.parse(blob, 2, 4999)
    with pytest.raises(BadShard, match="of 4"):
        codec.parse(blob, 4, 5000)


def blob_of_mode(mode: int) -> tuple[bytes, bytes]:
    """(blob, old) of a tensor of two blocks that are both of this mode."""
    old, new = adam_like(2 * BLOCK, 0.1, seed=mode)
    rows, payloads = [], []
    for at in (0, BLOCK):
        before, after = old[at : at + BLOCK], new[at : at + BLOCK]
        places, differences = reference.changed(before, after)
        payloads.append(modes.encode(mode, before, after, places, differences))
        rows.append(
            layout.BlockEntry(
                mode, len(places), 0, len(payloads[-1]), codec.digest(payloads[-1]), codec.digest(before),
                codec.digest(after),
            )
        )  # fmt: skip
    return layout.pack(2, len(old), rows, payloads, BLOCK), old.tobytes()


@pytest.mark.parametrize("mode", range(7))
def test_a_flipped_bit_anywhere_is_found(mode: int) -> None:
    blob, old = blob_of_mode(mode)
    good = restored(blob, old, 2)
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 1 << at % 8
        try:
            found = restored(damaged, old, 2)
        except BadShard:
            continue
        assert found == good, f"byte {at}: only padding between sections may change nothing"
        assert blob[at] == 0


@pytest.mark.parametrize("mode", range(7))
def test_a_truncated_blob_is_found_at_every_length(mode: int) -> None:
    blob, _ = blob_of_mode(mode)
    for length in range(0, len(blob), 3):
        with pytest.raises(BadShard):
            codec.parse(blob[:length], 2, 2 * BLOCK)


@pytest.mark.parametrize("mode", range(7))
@given(data=st.data())
def test_a_hostile_payload_is_refused_whatever_it_says(mode: int, data: st.DataObject) -> None:
    """Digests keep accidents out. A payload made up on purpose has right ones, and must not crash or take memory."""
    blob, old = blob_of_mode(mode)
    row = codec.parse(blob, 2, 2 * BLOCK).rows[0]
    payload = bytearray(blob[row.offset : row.offset + row.length])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    image = codec.as_elements(bytearray(old), 2)[:BLOCK]
    try:
        modes.apply(mode, memoryview(payload), image, data.draw(st.sampled_from([row.changed, 0, BLOCK])))
    except BadShard:
        return
    assert len(image) == BLOCK
