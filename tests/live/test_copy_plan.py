"""A plan does what the model's own loader does, or there is no plan."""

from __future__ import annotations

import pytest
import torch

from tests.live.toys import PADDED, VOCABULARY, Rank, Toy, checkpoint, equal, layouts, state
from watchers.live.copy_plan import PlanRefused, apply, gather, targets_of, trace

RANKS = [Rank(0, 1), Rank(0, 2), Rank(1, 2)]


@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_a_plan_does_what_the_loader_does(rank: Rank) -> None:
    model, reference, tensors = Toy(rank), Toy(rank), checkpoint(1)
    reference.load_weights(iter(tensors.items()))
    model.load_weights(iter(checkpoint(2).items()))
    plan = trace(model, layouts(tensors))
    apply(plan, targets_of(model), gather(plan, tensors))
    assert equal(state(model), state(reference))
    assert plan.unread == ("head.weight",)


@pytest.mark.parametrize("rank", RANKS, ids=str)
def test_planning_leaves_the_model_as_it_is(rank: Rank) -> None:
    model = Toy(rank)
    before, addresses = state(model), [p.data_ptr() for p in model.parameters()]
    trace(model, layouts(checkpoint(1)))
    assert equal(state(model), before)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_plan_keeps_the_addresses_that_cuda_graphs_hold() -> None:
    model, tensors = Toy(), checkpoint(1)
    plan, addresses = trace(model, layouts(tensors)), [p.data_ptr() for p in model.parameters()]
    apply(plan, targets_of(model), gather(plan, tensors))
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_a_cast_on_the_way_is_part_of_the_plan() -> None:
    model, reference, tensors = Toy(), Toy(), checkpoint(1, torch.float32)
    model.load_weights(iter(checkpoint(2).items()))
    reference.load_weights(iter(tensors.items()))
    plan = trace(model, layouts(tensors))
    apply(plan, targets_of(model), gather(plan, tensors))
    assert equal(state(model), state(reference))


class Norm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: object) -> None:
        for _, tensor in weights:  # type: ignore[attr-defined]
            self.norm.data.copy_(tensor)


def test_a_cast_between_tensors_of_one_name_is_part_of_the_plan() -> None:
    """A bfloat16 checkpoint in a float32 engine: most parameters bear their checkpoint's names."""
    model, tensors = Norm(), {"norm": torch.arange(4.0, dtype=torch.bfloat16)}
    plan = trace(model, layouts(tensors))
    apply(plan, targets_of(model), gather(plan, tensors))
    assert model.norm.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("missing", ["attn.q.weight", "norm.weight", "embed.weight"])
def test_a_missing_tensor_refuses_the_plan(missing: str) -> None:
    tensors = checkpoint(1)
    del tensors[missing]
    with pytest.raises(PlanRefused, match="never written"):
        trace(Toy(), layouts(tensors))


def test_a_wrong_shape_refuses_the_plan() -> None:
    tensors = checkpoint(1) | {"norm.weight": torch.zeros(7, dtype=torch.bfloat16)}
    with pytest.raises(PlanRefused):
        trace(Toy(), layouts(tensors))


def test_a_plan_is_not_used_for_another_layout() -> None:
    plan = trace(Toy(), layouts(checkpoint(1)))
    with pytest.raises(PlanRefused, match="the plan is for"):
        gather(plan, checkpoint(1, torch.float32))


class Twice(Toy):
    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor)
        self.norm.data[:2].copy_(tensor[:2])


class Overlapping(Toy):
    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor)
        self.norm.data.fill_(0)


class Scaled(Toy):
    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor + 1)


class InPlace(Toy):
    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor)
        self.norm.data.mul_(2)


class IntoOut(Toy):
    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        torch.add(torch.zeros(6, dtype=tensor.dtype), 1, out=self.norm.data)


class ByValue(Toy):
    """As vLLM's default loader does it for one element: a constant that is none."""

    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        for i in range(len(tensor)):
            self.norm.data[i].fill_(tensor[i].item())


class Replaced(Toy):
    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data = torch.zeros_like(self.norm.data)


class ReplacedWhole(Toy):
    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        self.norm = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))


class Swallowed(Toy):
    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        try:
            self.norm.data.copy_(tensor * 2)
        except Exception:  # a loader that goes on
            self.norm.data.copy_(tensor)


class Elsewhere(Toy):
    """Writes what is neither parameter nor buffer: nobody could put it back."""

    def __init__(self) -> None:
        super().__init__()
        self.derived = [torch.ones(6, dtype=torch.bfloat16)]

    def load_norm(self, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor)
        self.derived[0].copy_(tensor)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Twice, "written twice"),
        (Overlapping, "written twice"),
        (Scaled, "on the values of norm"),
        (InPlace, "mul_"),
        (IntoOut, "add"),
        (ByValue, "on the values of norm"),
        (Replaced, "replaces norm"),
        (ReplacedWhole, "replaces norm"),
        (Swallowed, "on the values of norm"),
        (Elsewhere, "no parameter or buffer"),
    ],
)
def test_a_loader_that_does_more_than_copy_has_no_plan_and_leaves_the_model(model: type[Toy], why: str) -> None:
    toy = model()
    before, held = state(toy), toy.norm
    with pytest.raises(PlanRefused, match=why):
        trace(toy, layouts(checkpoint(1)))
    assert equal(state(toy), before)
    assert toy.norm is held
    if isinstance(toy, Elsewhere):
        assert torch.equal(toy.derived[0], torch.ones(6, dtype=torch.bfloat16))


def test_an_empty_parameter_refuses_the_plan() -> None:
    """vLLM's CPU build packs linear layers and leaves their parameters empty."""
    toy = Toy()
    toy.packed = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(PlanRefused, match="packed is empty"):
        trace(toy, layouts(checkpoint(1)))


class NoFill(Toy):
    def load_embed(self, name: str, tensor: torch.Tensor) -> None:
        self.embed.data[:VOCABULARY].copy_(tensor)


def test_padding_that_no_load_writes_is_tolerated_only_where_it_is_known() -> None:
    with pytest.raises(PlanRefused, match=f"{(PADDED - VOCABULARY) * 6} elements of embed are never written"):
        trace(NoFill(), layouts(checkpoint(1)))
    assert trace(NoFill(), layouts(checkpoint(1)), padding={"embed": VOCABULARY}).padding == ("embed",)
    with pytest.raises(PlanRefused, match="6 elements of embed"):
        trace(NoFill(), layouts(checkpoint(1)), padding={"embed": VOCABULARY + 1})


class Transposed(torch.nn.Module):
    """A parameter that is a transposed view, as some kernels want it, and a tie by shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 4).t())
        self.tied = torch.nn.Parameter(self.weight.data)

    def load_weights(self, weights: object) -> None:
        for _, tensor in weights:  # type: ignore[attr-defined]
            self.weight.data.copy_(tensor.t())


def test_views_of_one_storage_are_covered_once() -> None:
    model, tensor = Transposed(), torch.arange(12.0).view(3, 4)
    plan = trace(model, {"w": ((3, 4), torch.float32)})
    apply(plan, targets_of(model), gather(plan, {"w": tensor}))
    assert torch.equal(model.tied.data, tensor.t())
