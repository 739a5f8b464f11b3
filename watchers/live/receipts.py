"""What each rank says of an update: one small file per rank, beside the staged version, read by the watcher.

vLLM's own answer to an update is one error of one rank, or none; which rank holds what is not in it.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from ckptsync.errors import EngineDirty, EngineRefused, ProofFailed
from ckptsync.manifest import Manifest

from .outcome import Outcome, Path, Proof, State

PROOFS = {
    "elements": "each element was read back",
    "sums": "sums of each copy were read back",
    "none": "not read back",
}


class RankReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's answer to one update."""

    rank: int
    label: str
    manifest_digest: str
    state: State
    path: Path | None = None
    why: str = ""
    proof: Proof = "none"
    seconds: float = 0.0
    proof_seconds: float = 0.0
    moved: int | None = None
    error: str = ""
    error_kind: str = ""


def receipt_of(outcome: Outcome, rank: int, label: str, manifest_digest: str) -> RankReceipt:
    error = outcome.error
    return RankReceipt(
        rank=rank, label=label, manifest_digest=manifest_digest, state=outcome.state, path=outcome.path,
        why=outcome.why, moved=outcome.moved,
        proof=outcome.proof, seconds=outcome.seconds, proof_seconds=outcome.proof_seconds,
        error=str(error) if error is not None else "", error_kind=error.kind if error is not None else "",
    )  # fmt: skip


def write_receipt(folder: str, receipt: RankReceipt) -> None:
    """Visible whole, or not at all."""
    path = os.path.join(folder, f"rank-{receipt.rank}.json")
    with open(path + ".part", "wb") as file:
        file.write(msgspec.json.encode(receipt))
    os.rename(path + ".part", path)


def write_begun(folder: str, rank: int) -> None:
    """This rank has been reached and can write here. OSError if it cannot: then it must touch nothing."""
    with open(os.path.join(folder, f"rank-{rank}.begun"), "wb"):
        pass


def any_begun(folder: str) -> bool:
    """Whether any rank has been reached."""
    return any(name.endswith(".begun") for name in os.listdir(folder))


def write_ready(folder: str, rank: int) -> None:
    """This rank has gathered what it needs. Nobody may be waiting any more."""
    with suppress(FileNotFoundError), open(os.path.join(folder, f"rank-{rank}.ready"), "wb"):
        pass


def await_ready(folder: str, ranks: int, seconds: float) -> bool:
    """Whether every rank came to be ready in time."""
    deadline = time.monotonic() + seconds
    while sum(name.endswith(".ready") for name in os.listdir(folder)) < ranks:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def read_receipts(folder: str) -> list[RankReceipt]:
    """Those that are there, by rank."""
    names = [name for name in os.listdir(folder) if name.endswith(".json")]
    return sorted((_read(os.path.join(folder, name)) for name in names), key=lambda receipt: receipt.rank)


def await_receipts(folder: str, ranks: int, seconds: float) -> list[RankReceipt]:
    """All ranks' receipts; fewer if they do not come in time. vLLM answers at the first rank's error, while the
    others may still be loading."""
    deadline = time.monotonic() + seconds
    while len(found := read_receipts(folder)) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def notes(receipts: Sequence[RankReceipt]) -> tuple[str, ...]:
    """Which way the version went in, and how it was proven; equal ranks in one line."""
    alike: dict[str, list[RankReceipt]] = {}
    for receipt in receipts:
        alike.setdefault(f"loaded by {_how(receipt)}, {PROOFS[receipt.proof]}", []).append(receipt)
    return tuple(f"rank {', '.join(str(each.rank) for each in of)}: {how}{_moved(of)}" for how, of in alike.items())


def _how(receipt: RankReceipt) -> str:
    if receipt.path != "plan":
        return f"the engine's own reload ({receipt.why})"
    if receipt.moved is not None:
        return "the copy plan (only what changed)"
    return f"the copy plan ({receipt.why})" if receipt.why else "the copy plan"


def _moved(alike: Sequence[RankReceipt]) -> str:
    moved = [receipt.moved for receipt in alike if receipt.moved is not None]
    return f"; {sum(moved) / 1e6:,.1f} MB moved" if moved else ""


def judge(receipts: Sequence[RankReceipt], ranks: int, manifest: Manifest) -> None:
    """Return if every rank holds the version. EngineRefused if every rank holds what it held before: it refused,
    or went back. EngineDirty if they hold different versions, or one does not say or does not know."""
    label = manifest.id.label
    wrong = [r for r in receipts if (r.label, r.manifest_digest) != (label, manifest.manifest_digest)]
    if wrong:
        raise ProofFailed(f"rank {wrong[0].rank} answers for {wrong[0].label}, not for {label}")
    if len(receipts) != ranks:
        raise EngineDirty(f"{label}: {len(receipts)} of {ranks} ranks say what they hold")
    states = {receipt.state for receipt in receipts}
    if states == {"loaded"}:
        return
    text = f"{label}: " + "; ".join(f"rank {r.rank} {r.state}{': ' if r.error else ''}{r.error}" for r in receipts)
    if states <= {"refused", "restored"}:
        raise EngineRefused(f"{text}; every rank holds the version before")
    raise EngineDirty(text)


def _read(path: str) -> RankReceipt:
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=RankReceipt)


@contextmanager
def receipt_folder(staged: str) -> Iterator[str]:
    """A new, private folder beside a staged version, where every rank of the host can reach it."""
    path = os.path.join(os.path.dirname(staged), f".update-{uuid.uuid4().hex[:12]}")
    os.mkdir(path, mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path)
