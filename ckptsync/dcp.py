"""Runs torch.distributed.checkpoint in lockstep with our ranks: its own group, its failures as ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from .errors import CkptSyncError, InvalidInput, RankFailed
from .ranks import Ranks


def own_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Collective: a gloo group for one call of DCP; None in a single process.

    Not the ranks' own group, where a rank that fails in DCP talks at once. The ranks agree first: torch numbers
    groups, so one that only some ranks have begun would put every later one out of step.
    """
    ranks.agree()
    if ranks.world_size == 1:
        return None
    return ranks.run(_new_group, "a process group for the trainer state")


def _new_group() -> dist.ProcessGroup | None:
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
    return group


def run_dcp(ranks: Ranks, what: str, call: Callable[[dict[str, Any]], object], group: dist.ProcessGroup | None) -> None:
    """One call of DCP over `group`, which is used up by it; released if another rank fails meanwhile."""
    try:
        ranks.run(lambda: _quietly(call, group), what)
    except CheckpointException as failed:
        raise _first_failure(failed) from failed


def _quietly(call: Callable[[dict[str, Any]], object], group: dist.ProcessGroup | None) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        # Alone in a job is no mistake here, and what DCP deprecates in itself is not the trainer's business.
        warnings.simplefilter("ignore")
        call({"process_group": group} if group is not None else {"no_dist": True})
    if group is not None:
        dist.destroy_process_group(group)


def _first_failure(failed: CheckpointException) -> CkptSyncError:
    rank, (error, _) = next(iter(failed.failures.items()))
    if isinstance(error, CkptSyncError):
        return error
    if isinstance(error, RuntimeError | ValueError):  # DCP's own: a name is missing, or a size is another
        return InvalidInput(f"trainer_state: {error}")
    return RankFailed(f"rank {rank}: {type(error).__name__}: {error}")
