"""What the model holds is read through the plan; one changed bit is found by each of the three looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ckptsync.digest import digest
from ckptsync.shards.tensors import tensor_bytes
from tests.live.toys import Rank, Toy, checkpoint, layouts
from watchers.live import payload as payload_module
from watchers.live import readback
from watchers.live.copy_plan import CopyPlan, gather, targets_of, trace
from watchers.live.payload import Payload
from watchers.live.readback import (
    ROW,
    checkpoint_digests,
    differing,
    disagreeing,
    live_views,
    sums,
)

Tensors = dict[str, torch.Tensor]
Look = Callable[[CopyPlan, Toy, Tensors], list[str]]


def by_elements(plan: CopyPlan, model: Toy, tensors: Tensors) -> list[str]:
    return differing(plan, targets_of(model), gather(plan, tensors))


def by_sums(plan: CopyPlan, model: Toy, tensors: Tensors) -> list[str]:
    return disagreeing(plan, sums(live_views(plan, targets_of(model))), sums(gather(plan, tensors)))


def by_digests(plan: CopyPlan, model: Toy, tensors: Tensors) -> list[str]:
    live = checkpoint_digests(plan, targets_of(model))
    return [name for name, found in live.items() if found != digest(tensor_bytes(tensors[name]))]


LOOKS = [by_elements, by_sums, by_digests]


def loaded(rank: Rank, tensors: Tensors) -> tuple[CopyPlan, Toy]:
    model = Toy(rank)
    model.load_weights(iter(tensors.items()))
    return trace(model, layouts(tensors)), model


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("rank", [Rank(0, 1), Rank(0, 2), Rank(1, 2)], ids=str)
def test_what_the_loader_loaded_reads_back_equal(look: Look, rank: Rank) -> None:
    tensors = checkpoint(1)
    plan, model = loaded(rank, tensors)
    assert look(plan, model, tensors) == []


@pytest.mark.parametrize("look", LOOKS)
def test_one_changed_bit_is_found_and_named(look: Look) -> None:
    tensors = checkpoint(1)
    plan, model = loaded(Rank(), tensors)
    model.qkv.data.view(torch.int16)[9, 3] ^= 1
    assert look(plan, model, tensors) == ["attn.k.weight"]


@pytest.mark.parametrize("look", LOOKS)
def test_a_negative_zero_is_not_zero(look: Look) -> None:
    tensors = checkpoint(1)
    tensors["norm.weight"][2] = 0.0
    plan, model = loaded(Rank(), tensors)
    model.norm.data[2] = -0.0
    assert look(plan, model, tensors) == ["norm.weight"]


@pytest.mark.parametrize("look", LOOKS)
def test_nan_equals_itself(look: Look) -> None:
    tensors = checkpoint(1)
    tensors["norm.weight"][2] = float("nan")
    plan, model = loaded(Rank(), tensors)
    assert look(plan, model, tensors) == []


def test_digests_are_of_tensors_that_the_rank_holds_whole() -> None:
    tensors = checkpoint(1)
    plan, model = loaded(Rank(0, 2), tensors)
    assert checkpoint_digests(plan, targets_of(model)) == {"norm.weight": digest(tensor_bytes(tensors["norm.weight"]))}


def test_changed_padding_is_found() -> None:
    tensors = checkpoint(1)
    plan, model = loaded(Rank(), tensors)
    model.embed.data[-1, 0] = 1
    assert by_elements(plan, model, tensors) == ["embed"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [1, 3, ROW, 3 * ROW + 5, 8 * ROW])
def test_sums_see_a_flip_a_swap_and_a_shift_anywhere(dtype: torch.dtype, count: int) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    flipped = raw.clone()
    flipped[len(raw) // 2] ^= 0x80
    changed = [flipped]
    if len(raw) > 1:
        swapped = raw.clone()
        swapped[0], swapped[-1] = raw[-1], raw[0] ^ (raw[0] == raw[-1])
        changed += [swapped, raw.roll(1)]
    before = sums([raw.view(dtype)])
    assert torch.equal(before, sums([raw.clone().view(dtype)]))
    assert all(not torch.equal(before, sums([other.view(dtype)])) for other in changed)


def test_sums_do_not_depend_on_the_address() -> None:
    tensor = torch.arange(100, dtype=torch.int16).view(torch.bfloat16)
    shifted = torch.empty(101, dtype=torch.bfloat16)[1:]
    shifted.copy_(tensor)
    assert torch.equal(sums([tensor]), sums([shifted]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [ROW, 3 * ROW + 5])
def test_the_hosts_sums_are_those_that_a_gpu_takes(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * 8,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(dtype)[: len(raw.view(dtype)) - 1]  # of an odd number of words, and of whole ones
    for each in (raw.view(dtype), tensor):
        table, rest = readback._rows(each)
        on_gpu = [*(table.sum(dim=dim, dtype=torch.int64) for dim in (1, 0)), rest.to(torch.int64)]
        assert torch.equal(sums([each]), readback._weighed([on_gpu]))


def test_sums_tell_two_rows_apart() -> None:
    rows = torch.arange(2 * ROW, dtype=torch.int32).view(2, ROW)
    assert not torch.equal(sums([rows]), sums([rows.flip(0)]))


def test_a_pinned_payload_is_applied_and_proven_by_sums() -> None:
    old, new = checkpoint(1), checkpoint(2, torch.float32)  # cast while it is gathered
    plan, model = loaded(Rank(0, 2), new)
    model.load_weights(iter(old.items()))
    pieces = Payload().of("folder", plan, targets_of(model), new, pinned=True)
    assert (pieces.proof, pieces.load(plan, targets_of(model)).wrong) == ("sums", [])
    assert differing(plan, targets_of(model), gather(plan, new)) == []


def test_a_piece_that_changed_after_it_was_gathered_fails_the_proof() -> None:
    plan, model = loaded(Rank(), checkpoint(1))
    pieces = Payload().of("folder", plan, targets_of(model), checkpoint(2), pinned=True)
    pieces.pieces[0].view(torch.int16)[0, 0] ^= 1
    assert pieces.load(plan, targets_of(model)).wrong == [plan.copies[0].source]


def test_pinned_memory_is_used_again_for_the_next_version() -> None:
    plan, model = loaded(Rank(), checkpoint(1))
    payload = Payload()
    first = payload.of("one", plan, targets_of(model), checkpoint(1), pinned=True)
    assert payload.of("one", plan, targets_of(model), checkpoint(1), pinned=True) is first
    second = payload.of("two", plan, targets_of(model), checkpoint(2), pinned=True)
    assert second.pieces[0].data_ptr() == first.pieces[0].data_ptr()


def test_pinned_memory_comes_in_chunks_of_whole_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_module, "CHUNK", 1024)
    plan, model = loaded(Rank(), checkpoint(1))
    pieces = Payload().of("folder", plan, targets_of(model), checkpoint(2), pinned=True)
    assert len({piece.untyped_storage().data_ptr() for piece in pieces.pieces}) > 1
    assert pieces.load(plan, targets_of(model)).wrong == []
    assert differing(plan, targets_of(model), gather(plan, checkpoint(2))) == []
