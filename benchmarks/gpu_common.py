"""How the benchmarks on a GPU measure, and say what they found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ckptsync.engine import StagedVersion

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def note(result: dict[str, Any], **found: Any) -> None:
    """Keep it, and say it at once."""
    result |= found
    for name, value in found.items():
        print(f"{name}: {value}", file=sys.stderr, flush=True)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any]) -> float:
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def copy_limit(nbytes: int, rounds: int) -> float:
    """Seconds for one copy of that size from pinned memory to the device, best of the rounds."""
    if not torch.cuda.is_available():
        source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
        return min(seconds(lambda: target.copy_(source)) for _ in range(rounds))
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return min(seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(rounds + 1))


def compare(name: str, found: Any, expected: Any) -> dict[str, Any]:
    """Tokens must be equal; how far the logprobs are apart is reported, since not every kernel is deterministic."""
    (tokens, logprobs), (others, other_logprobs) = found, expected
    pairs = ((x, y) for a, b in zip(logprobs, other_logprobs, strict=True) for x, y in zip(a, b, strict=True))
    return {name: tokens == others, name + "_logprob_difference": max(abs(x - y) for x, y in pairs)}


def rounds(engine: Any, versions: tuple[StagedVersion, StagedVersion], count: int) -> dict[str, Any]:
    """To one version and to the other, `count` times."""
    found: dict[str, list[Any]] = {"pause": [], "proof": [], "prepare": [], "inside": [], "moved": []}
    for i in range(2 * count):
        version = versions[i % 2]
        found["prepare"].append(seconds(lambda v=version: engine.prepare(v)))
        found["pause"].append(seconds(lambda v=version: engine.update(v)))
        outcome = engine.engine.outcome
        if outcome.path != "plan" or outcome.why:
            raise SystemExit(f"round {i} took the {outcome.path}: {outcome.why}")
        found["proof"].append(outcome.proof_seconds)
        found["inside"].append(outcome.seconds)
        found["moved"].append(outcome.moved)
    return {"proof_kind": outcome.proof, **{f"{name}_all": values for name, values in found.items()}}
