"""What the benchmarks of two GPUs call equal, and routed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu_fast import colocated
from benchmarks.vllm_front import alike

WHOLE = {"layer.qkv_proj.weight": 5.0, "layer.norm.weight": 2.0}


def test_ranks_hold_a_checkpoint_if_their_parts_add_up_and_each_has_the_norms() -> None:
    first = {"layer.qkv_proj.weight": 3.0, "layer.norm.weight": 2.0}
    assert alike([first, first | {"layer.qkv_proj.weight": 2.0}], WHOLE)
    assert not alike([first, first], WHOLE), "the parts do not add up"
    assert not alike([first, {"layer.qkv_proj.weight": 2.0, "layer.norm.weight": 1.0}], WHOLE), "one norm is old"
    assert alike([WHOLE], WHOLE)


@pytest.mark.parametrize(
    ("bucket", "missed"),
    [
        ({"gpus": ["GPU-0", "GPU-1"], "ranks": 2}, None),
        ({"gpus": ["GPU-0"], "ranks": 2}, "each bucket had a handle for each of them, by UUID"),
        ({"gpus": ["GPU-0", "GPU-1"], "ranks": 1}, "each bucket was answered by every rank"),
    ],
)
def test_a_bucket_without_a_handle_or_an_answer_is_a_bar_missed(bucket: dict[str, Any], missed: str | None) -> None:
    bars = colocated({"gpus": ["GPU-1", "GPU-0"], "asked": [bucket]})
    assert [name for name, met in bars.items() if not met] == ([missed] if missed else [])
    assert colocated({"gpus": ["GPU-0"], "asked": [bucket]}) == {}
