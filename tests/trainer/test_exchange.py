"""Values of any size travel between ranks as they are; a failure of any length reaches all."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.errors import RankFailed
from ckptsync.ranks import Ranks
from tests.trainer.ranks_harness import catching, returned, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SIZES = (0, 900, 1015, 1016, 5000)
"""Around the KiB that travels with the first round."""


def talk(rank: int) -> dict[str, Any]:
    ranks = Ranks(timeout=60)
    found: dict[str, Any] = {size: ranks.broadcast(bytes([rank]) * size) for size in SIZES}
    found |= {f"gather {size}": ranks.gather("x" * (size * rank)) for size in SIZES}
    errors: dict[str, Any] = {}
    with catching(errors, "long"), ranks.together():
        if rank == 1:
            raise OSError("n" * 4000)
    ranks.agree()
    ranks.close()
    return found | {"error": errors["long"]}


def test_values_and_failures_of_every_size_reach_every_rank() -> None:
    for rank, found in enumerate(returned(run_ranks(3, talk))):
        for size in SIZES:
            assert found[size] == bytes(size)
            assert found[f"gather {size}"] == ["x" * (size * each) for each in range(3)]
        assert found["error"].kind == (RankFailed.__name__)
        assert found["error"].message.endswith("n" * 4000)
        assert "rank 1" in found["error"].message, rank
