"""Only what changed goes into the live model: found bit for bit, scattered, and proven with all the rest."""

from __future__ import annotations

import pytest
import torch

from tests.live.toys import Rank, Toy, checkpoint, layouts
from watchers.live import changes as changes_module
from watchers.live.changes import most, pack, patch
from watchers.live.copy_plan import CopyPlan, gather, targets_of, trace
from watchers.live.payload import Payload, Pieces
from watchers.live.readback import differing

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_pieces_are_scattered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "SMALL", 0)
    monkeypatch.setattr(changes_module, "MOST", 4)


def changed(tensors: Tensors, *names: str) -> Tensors:
    """A version in which each of these tensors has other values in its corners."""
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in names:
        flat = new[name].view(-1)
        flat[0], flat[-1] = -flat[0], 7.0
    return new


class Held:
    """A model of one rank that was loaded with a payload, and is brought to further versions."""

    def __init__(self, tensors: Tensors, rank: Rank | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model, self.payload = Toy(rank, dtype), Payload()
        self.model.load_weights(iter(tensors.items()))
        self.plan: CopyPlan = trace(self.model, layouts(tensors))
        self.held: int | None = None
        self.fillings = 0
        self.targets = targets_of(self.model)
        first = self.pieces(tensors)
        assert first.load(self.plan, self.targets).wrong == []
        self.held = first.number

    def pieces(self, tensors: Tensors) -> Pieces:
        self.fillings += 1
        return self.payload.of(f"v{self.fillings}", self.plan, self.targets, tensors, pinned=True, held=self.held)

    def holds(self, tensors: Tensors) -> bool:
        return differing(self.plan, self.targets, gather(self.plan, tensors)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("count", [0, 1, 3, 64, 1001])
def test_what_differs_is_found_bit_for_bit(dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "BLOCK", 64)
    generator = torch.Generator().manual_seed(count)
    size = torch.empty(0, dtype=dtype).element_size()
    old = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    new = old.clone()
    new[torch.rand(count * size, generator=generator) < 0.05] ^= 0x80
    expected = (old != new).view(-1, size).any(dim=1).nonzero().flatten() if count else torch.empty(0)
    piece = old.clone().view(dtype)
    found = patch(piece, new.view(dtype), count)
    assert found is not None
    assert found[0].tolist() == expected.tolist()
    assert found[1].tobytes() == new.view(-1, size)[expected.long()].numpy().tobytes()
    assert torch.equal(piece.view(torch.uint8), new)


def test_a_nan_is_no_change_and_a_negative_zero_is_one() -> None:
    old, new = torch.tensor([float("nan"), 0.0, 1.0]), torch.tensor([float("nan"), -0.0, 1.0])
    found = patch(old, new, 3)
    assert found is not None
    assert found[0].tolist() == [1]


def test_a_piece_of_which_much_changed_is_copied_whole() -> None:
    old, new = torch.zeros(8), torch.arange(8.0)
    assert patch(old, new, 6) is None
    assert torch.equal(old, new)


@pytest.mark.parametrize("rank", [Rank(0, 1), Rank(0, 2), Rank(1, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_rank_scatters_what_changed_of_its_slices(rank: Rank, dtype: torch.dtype) -> None:
    old = checkpoint(1)
    new = changed(old, "attn.k.weight", "attn.o.weight", "embed.weight")
    held = Held(old, rank, dtype)
    pieces = held.pieces(new)
    assert pieces.changes is not None
    places = [part.piece for chunk in pieces.changes.chunks for part in chunk.parts]
    assert {held.plan.copies[index].source for index in places} == {"attn.k.weight", "attn.o.weight", "embed.weight"}
    done = pieces.load(held.plan, held.targets, held.held)
    assert (done.wrong, done.why, done.moved) == ([], "", pieces.changes.nbytes)
    assert held.holds(new)


def test_pieces_that_did_not_change_are_not_touched_and_are_proven() -> None:
    old = checkpoint(1)
    new = changed(old, "attn.k.weight")
    held = Held(old)
    pieces = held.pieces(new)
    assert pieces.changes is not None
    assert len(pieces.changes.untouched) == len(held.plan.copies) - 1
    live = [copy.write.on(held.targets[copy.target]) for copy in held.plan.copies]
    read_only = [tensor.clone() for tensor in live]
    for index in pieces.changes.untouched:
        live[index] = read_only[index]
    assert sorted(pieces.changes.put(live, pieces.pieces)) == list(range(len(live)))
    assert all(torch.equal(read_only[index], pieces.pieces[index]) for index in pieces.changes.untouched)
    assert held.holds(new)


def test_changes_of_many_pieces_come_in_chunks_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "CHUNK", 32)
    monkeypatch.setattr(changes_module, "PART", 1)
    old = checkpoint(1)
    new = changed(old, *old)
    held = Held(old)
    pieces = held.pieces(new)
    assert pieces.changes is not None
    assert len(pieces.changes.chunks) > 3
    assert all(chunk.memory.nbytes <= 32 for chunk in pieces.changes.chunks)
    assert pieces.load(held.plan, held.targets, held.held).moved is not None
    assert held.holds(new)


def test_of_a_piece_that_is_all_new_no_places_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*_: object) -> object:
        raise AssertionError("places were listed")

    monkeypatch.setattr(changes_module, "_differing_block", listed)
    piece, new = torch.zeros(1 << 14), torch.rand(1 << 14) + 1
    assert patch(piece, new, most(piece)) is None
    assert torch.equal(piece, new)


def test_a_column_that_changed_is_not_taken_for_a_piece_that_is_all_new() -> None:
    piece, new = torch.zeros(1 << 10, 1 << 6), torch.zeros(1 << 10, 1 << 6)
    new[:, 0] = 1  # a sample with the rows' own step would see nothing else
    found = patch(piece, new, most(piece))
    assert found is not None
    assert found[0].tolist() == list(range(0, 1 << 16, 1 << 6))


def test_a_live_view_with_gaps_is_copied_whole() -> None:
    memory = torch.zeros(8, 4)
    live = memory.t()
    assert most(live) == 0
    piece, new = torch.zeros(4, 8), torch.zeros(4, 8)
    new[1, 2] = 5
    changes = pack([patch(piece, new, most(live))], [piece])
    assert (changes.chunks, changes.whole) == ([], [0])
    assert list(changes.put([live], [piece])) == [0]
    assert torch.equal(live, new)


def test_small_pieces_are_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "SMALL", 64)
    assert (most(torch.zeros(16)), most(torch.zeros(17))) == (0, 4)


def test_what_somebody_else_wrote_meanwhile_is_found_and_everything_is_copied() -> None:
    old = checkpoint(1)
    new = changed(old, "attn.k.weight")
    held = Held(old)
    pieces = held.pieces(new)
    held.model.norm.data[1] = 5
    done = pieces.load(held.plan, held.targets, held.held)
    assert (done.wrong, done.moved) == ([], None)
    assert "norm.weight" in done.why
    assert held.holds(new)


def test_a_scatter_that_went_wrong_does_not_pass() -> None:
    old = checkpoint(1)
    held = Held(old)
    pieces = held.pieces(changed(old, "attn.k.weight"))
    assert pieces.changes is not None
    pieces.changes.chunks[0].memory[-8:] ^= 1
    pieces.pieces[0].view(torch.int16)[0, 0] ^= 1
    assert pieces.load(held.plan, held.targets, held.held).wrong == [held.plan.copies[0].source]


def test_a_version_in_which_everything_changed_is_no_change() -> None:
    held = Held(checkpoint(1))
    pieces = held.pieces(checkpoint(2))
    assert pieces.changes is None
    assert pieces.load(held.plan, held.targets, held.held).wrong == []
    assert held.holds(checkpoint(2))


def test_another_filling_than_what_is_live_is_copied_whole() -> None:
    old = checkpoint(1)
    held = Held(old)
    held.pieces(changed(old, "attn.k.weight"))  # and never loaded
    new = changed(old, "attn.q.weight")
    pieces = held.pieces(new)
    assert pieces.changes is None
    assert pieces.load(held.plan, held.targets, held.held).moved is None
    assert held.holds(new)
