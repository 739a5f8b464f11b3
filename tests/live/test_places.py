"""Where a model's tensors are is asked once, and again as soon as any of them moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from watchers.live.copy_plan import targets_of
from watchers.live.places import Places


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Sequential(torch.nn.BatchNorm1d(4)))


def test_tensors_that_stayed_where_they_were_are_not_asked_for_again() -> None:
    module = model()
    places = Places(module)
    first = places.tensors()
    with torch.no_grad():
        module[0].weight.fill_(3.0)
    assert places.tensors() is first
    assert {name: tensor.data_ptr() for name, tensor in first.items()} == {
        name: tensor.data_ptr() for name, tensor in targets_of(module).items()
    }


def other_memory(module: torch.nn.Module) -> None:
    module[0].weight.data = torch.ones(4, 4)


def other_parameter(module: torch.nn.Module) -> None:
    module[0].weight = torch.nn.Parameter(torch.ones(4, 4))


def other_buffer(module: torch.nn.Module) -> None:
    module[1][0].running_mean = torch.ones(4)


def other_module(module: torch.nn.Module) -> None:
    module[1] = torch.nn.Sequential(torch.nn.BatchNorm1d(4))


def one_fewer(module: torch.nn.Module) -> None:
    del module[1]


@pytest.mark.parametrize("change", [other_memory, other_parameter, other_buffer, other_module, one_fewer])
def test_whatever_moves_is_found_where_it_is_now(change: Callable[[torch.nn.Module], None]) -> None:
    module = model()
    places = Places(module)
    before = places.tensors()
    change(module)
    found = places.tensors()
    assert found is not before
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == {
        name: tensor.data_ptr() for name, tensor in targets_of(module).items()
    }
