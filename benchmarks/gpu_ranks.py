"""The pause for files on an engine of several GPUs: copy plan, proof and receipt of each rank, against its limit.

    python -m benchmarks.gpu_ranks [--tp 2] [--pp 1] [--shape 4b|tiny] [--work DIR] [--rounds 5] [--json FILE]

As `gpu_pause`, with vLLM tensor or pipeline parallel: each rank is a process with a GPU and a share of the weights. In
one run, for each rank:

- limit    one pinned copy of its share to its GPU, while the other ranks copy theirs
- full     a version of which every weight differs: start, update with the read-back proof inside, finish
- changed  a version of which one weight in a hundred differs (`--change`)
- stock    `reload_weights` of the same files

The pause is of the whole engine, and each rank's receipt says how it loaded and proved. Outputs after each must be
those of the stock reload. `--dry` runs it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import in_worker
from benchmarks.gpu_common import seconds
from benchmarks.gpu_pause import PROMPTS, device_name, library_versions, make_version
from benchmarks.shapes import SHAPES
from ckptsync.engine import StagedVersion
from watchers.live.receipts import judge, read_receipts

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Engine:
    """vLLM, its ranks in processes of their own."""

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        from vllm import LLM

        memory = {} if args.dry else {"gpu_memory_utilization": args.memory}
        self.llm: Any = LLM(
            folder, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=8, dtype="bfloat16", enforce_eager=True,
            weight_transfer_config={"backend": "ckptsync"}, tensor_parallel_size=args.tp,
            pipeline_parallel_size=args.pp, distributed_executor_backend="mp", disable_custom_all_reduce=True, **memory,
        )  # fmt: skip
        self.ranks, self.work = args.tp * args.pp, args.work

    def rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        return list(self.llm.collective_rpc(method, args=args, kwargs=kwargs))

    def outputs(self) -> list[list[int]]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        self.llm.reset_prefix_cache()
        found = self.llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], greedy, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in found]

    def prepare(self, version: StagedVersion) -> float:
        return max(self.rpc(in_worker.prepare, version.folder, version.manifest.manifest_digest))

    def update(self, version: StagedVersion) -> tuple[float, list[dict[str, Any]]]:
        """Seconds for the engine, and what each rank says. A CkptSyncError unless every rank's receipt says that it
        holds the version."""
        manifest = version.manifest
        info = {"folder": version.folder, "manifest_digest": manifest.manifest_digest, "label": version.label}
        with tempfile.TemporaryDirectory(dir=self.work) as receipts:

            def work() -> None:
                self.rpc("start_weight_update")
                self.rpc("update_weights", update_info=info | {"receipts": receipts})
                self.rpc("finish_weight_update")

            took = seconds(work)
            judge(read_receipts(receipts), self.ranks, manifest)
        return took, self.rpc(in_worker.outcome)

    def stock(self, version: StagedVersion) -> float:
        return seconds(lambda: self.rpc("reload_weights", weights_path=version.folder))


Note = Callable[..., None]


def measure(args: argparse.Namespace, note: Note) -> None:
    device = "cpu" if args.dry else "cuda"
    a = make_version(os.path.join(args.work, "a"), SHAPES[args.shape], 1, device)
    b = make_version(os.path.join(args.work, "b"), SHAPES[args.shape], 2, device)
    c = make_version(os.path.join(args.work, "c"), SHAPES[args.shape], 2, device, number=3, change=args.change)
    if not args.dry:
        torch.cuda.empty_cache()
    note(bytes=sum(entry.spec.nbytes for entry in a.manifest.tracks["model"].tensors), change=args.change)
    engine = Engine(a.folder, args)
    note(gpus=[] if args.dry else engine.rpc(in_worker.gpu), held=engine.rpc(in_worker.held))
    of_a = engine.outputs()
    note(stock_all=[engine.stock(version) for version in (b, a, c)])
    expected = {c.label: engine.outputs(), a.label: of_a}
    took, ranks = engine.update(a)
    note(first_update=took, first=ranks, no_plan=engine.rpc(in_worker.why_no_plan))
    note(limit=engine.rpc(in_worker.copy_limit, args.rounds))
    engine.update(b)  # pinned memory is made, once
    note(full=rounds(engine, [a, b] * args.rounds), changed=rounds(engine, [c, b] * args.rounds))
    note(proof_alone=engine.rpc(in_worker.proof_alone, args.rounds))
    for version in (c, a):
        engine.prepare(version)
        engine.update(version)
        note(**{f"outputs_{version.label}_equal_stock": engine.outputs() == expected[version.label]})
    note(versions_differ=expected[a.label] != expected[c.label])


def rounds(engine: Engine, versions: list[StagedVersion]) -> dict[str, Any]:
    prepares, pauses, ranks = [], [], []
    for version in versions:
        prepares.append(engine.prepare(version))
        took, said = engine.update(version)
        pauses.append(took)
        ranks.append(said)
    return {"prepare": prepares, "pause": pauses, "ranks": ranks}


def judged(found: dict[str, Any], args: argparse.Namespace) -> dict[str, bool]:
    updates = [said for name in ("full", "changed") for said in found.get(name, {"ranks": []})["ranks"]]
    bars = {
        "every rank loaded by the plan, proven": bool(updates) and all(
            rank["path"] == "plan" and rank["proof"] in ("sums", "elements") for said in updates for rank in said
        ),
        "outputs are those of the stock reload": all(
            found.get(f"outputs_{label}_equal_stock") for label in ("e1-v1", "e1-v3")
        ) and bool(found.get("versions_differ")),
    }  # fmt: skip
    if args.dry or "full" not in found:
        return bars
    pause, limit = statistics.median(found["full"]["pause"]), max(found["limit"])
    return bars | {
        "a GPU of its own for each rank": len(set(found["gpus"])) == args.tp * args.pp,
        "full: pause <= 1.15 x limit": pause <= 1.15 * limit,
        "full: stock >= 5 x pause": statistics.median(found["stock_all"]) >= 5 * pause,
        "full: proof <= 50 ms": statistics.median(proofs(found["full"])) <= 0.05,
        "changed: pause <= 40 ms": statistics.median(found["changed"]["pause"]) <= 0.04,
    }


def proofs(found: dict[str, Any]) -> list[float]:
    """Of the slowest rank in each update."""
    return [max(rank["proof_seconds"] for rank in said) for said in found["ranks"]]


def table(found: dict[str, Any], args: argparse.Namespace) -> str:
    shares = [nbytes / 1e9 for nbytes in found.get("held", [])]
    share = max(shares, default=0.0)
    rows = [(f"limit: pinned copy, rank {rank}", value) for rank, value in enumerate(found.get("limit", []))]
    for name in ("full", "changed"):
        if name in found:
            each = found[name]
            inside = [max(rank["seconds"] for rank in said) for said in each["ranks"]]
            rows += [
                (f"{name}: start, update with proof, finish", statistics.median(each["pause"])),
                ("  of which in the slowest worker's update", statistics.median(inside)),
                ("  of which the read-back proof, beyond the copies", statistics.median(proofs(each))),
                ("  before the pause: prepare", statistics.median(each["prepare"])),
            ]
    if "proof_alone" in found:
        rows.append(("the proof alone, best of the slowest rank", max(found["proof_alone"])))
    if "stock_all" in found:
        rows.append(("stock reload_weights", statistics.median(found["stock_all"])))
    lines = [
        f"TP {args.tp}, PP {args.pp}, {found.get('device')}, vLLM {found.get('vllm')}, "
        f"{found.get('bytes', 0) / 1e9:.2f} GB bf16, "
        f"{', '.join(f'{each:.2f}' for each in shares)} GB by rank, {args.change:.1%} changed",
        "",
        "| | seconds | GB/s of a rank |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {name} | {value:.4f} | {share / value:.1f} |" for name, value in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description="The pause for files on an engine of several GPUs.")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--work", default="/dev/shm/gpu-ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--change", type=float, default=0.01, help="the share of weights that differ")
    parser.add_argument("--memory", type=float, default=0.4, help="vLLM's share of each GPU")
    parser.add_argument("--dry", action="store_true", help="without a GPU")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    in_worker.arrange()
    found: dict[str, Any] = {"device": device_name(), **library_versions()}

    def note(**more: Any) -> None:
        found.update(more)
        print(json.dumps(more), flush=True)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)

    shutil.rmtree(args.work, ignore_errors=True)
    site = in_worker.site(os.path.join(args.work, "site"))
    os.environ["PYTHONPATH"] = os.pathsep.join([site, REPO, os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, site)
    if args.dry:
        os.environ[in_worker.DRY] = "1"
    try:
        measure(args, note)
    finally:
        shutil.rmtree(args.work, ignore_errors=True)
        print(table(found, args), flush=True)
    bars = judged(found, args)
    print("\n".join(f"{'met   ' if met else 'MISSED'} {bar}" for bar, met in bars.items()), flush=True)
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # vLLM's threads may hold up a normal exit
