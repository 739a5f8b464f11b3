"""Which of vLLM's layers compute from more than their parameters; no vLLM needed to say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from watchers.vllm_plugin.derived import holds_more_than_parameters


class UnquantizedFusedMoEMethod:
    def __init__(self, backend: str) -> None:
        self.unquantized_backend = SimpleNamespace(name=backend)


def mixture(backend: str, *, balanced: bool = False) -> torch.nn.Module:
    experts: Any = torch.nn.Linear(2, 2)
    experts.quant_method = UnquantizedFusedMoEMethod(backend)
    experts.moe_config = SimpleNamespace(moe_parallel_config=SimpleNamespace(enable_eplb=balanced))
    return torch.nn.Sequential(experts)


@pytest.mark.parametrize("backend", ["CPU", "FLASHINFER_TRTLLM", "AITER", "MOONEP"])
def test_experts_that_a_kernel_wants_in_another_layout_are_not_copied_into(backend: str) -> None:
    assert f"packs its experts for the kernel {backend}" in holds_more_than_parameters(mixture(backend))


def test_experts_that_move_between_ranks_are_not_copied_into() -> None:
    assert "moves its experts" in holds_more_than_parameters(mixture("TRITON", balanced=True))


@pytest.mark.parametrize("backend", ["TRITON", "BATCHED_TRITON"])
def test_experts_that_a_kernel_takes_as_they_are_loaded_may_be_copied_into(backend: str) -> None:
    assert holds_more_than_parameters(mixture(backend)) == ""
