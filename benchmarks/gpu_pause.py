"""The pause for a full version on a real GPU: copy plan against stock `reload_weights` and the pinned-copy limit.

    python -m benchmarks.gpu_pause [--shape 4b|tiny] [--work /dev/shm/gpu-pause] [--rounds 5] [--json FILE]
                                   [--change 0.01]

Runs vLLM in this process with the plugin registered, on two random versions of one Qwen3 shape. In one run:

- limit    one pinned buffer of the model's size to the device, best of the rounds
- stock    `reload_weights` of the same files from --work, which should be in memory (/dev/shm)
- plan     start, update, finish through the plugin, after `prepare` has gathered the pinned pieces, with the
           read-back proof inside; the proof's own time is also shown alone
- outputs  greedy tokens and logprobs after each, which must be equal for equal weights
- change   with `--change`, a third version of which that share of the elements differs, back and forth: see
           `gpu_pause_change`

What is measured is said on stderr at once, and written to the file even if a later step fails.

Needs vLLM >= 0.26 with its dependencies, xxhash and tenacity. For a machine without a network, a folder to put on
PYTHONPATH there:

    pip install --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \\
        --target extra xxhash tenacity

Exit status 1 if the outputs differ or, on CUDA, if a bar is missed: plan <= 1.15 x limit, stock >= 5 x plan,
proof <= 50 ms, pause for 1 % <= 40 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import uuid
from typing import Any

import torch

from benchmarks import in_worker
from benchmarks.gpu_common import DEVICE, compare, copy_limit, note, rounds, seconds
from benchmarks.gpu_pause_change import change_table, crossover, measure_change
from benchmarks.shapes import SHAPES, layers_of
from ckptsync.digest import DEFAULT, digest
from ckptsync.engine import StagedVersion
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import FileEntry, Manifest, TensorEntry, Track, combined_content, seal
from ckptsync.shards.tensors import spec_of, tensor_bytes

SHARD = 2 << 30
PROMPTS = ([1, 2, 3, 4, 5], [200, 100, 50, 25], [7 * i % 251 for i in range(300)])


def make_version(
    folder: str, shape: dict[str, Any], seed: int, device: str, *, number: int = 0, change: float = 0.0
) -> StagedVersion:
    """A random checkpoint with the manifest that a stage seals; that of the seed, with this share of it changed by the
    last bit."""
    from safetensors.torch import save_file

    os.makedirs(folder)
    generator, luck = (torch.Generator(device).manual_seed(each) for each in (seed, seed + 1000))
    files: list[FileEntry] = []
    tensors: list[TensorEntry] = []
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(files):05d}.safetensors"
        save_file(shard, os.path.join(folder, name), metadata={"format": "pt"})
        files.append(FileEntry(name=name, size=os.path.getsize(os.path.join(folder, name)), digest="unused"))
        for key, tensor in shard.items():
            spec = spec_of(key, tensor)
            entry = TensorEntry(
                name=key, dtype=spec.dtype, shape=spec.shape, digest=digest(tensor_bytes(tensor)), file=name
            )
            tensors.append(entry)
            weight_map[key] = name
        shard.clear()

    for name, size in layers_of(shape):
        mean = 1.0 if len(size) == 1 else 0.0
        values = torch.randn(size, generator=generator, device=device).mul_(0.05).add_(mean)
        values = values.to(torch.bfloat16)
        if change:
            values.view(torch.int16).bitwise_xor_(torch.rand(size, generator=luck, device=device) < change)
        shard[name] = values.cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            flush()
    flush()
    write_json(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder, "config.json", config_of(shape))
    tracks = {"model": Track(files=tuple(files), tensors=tuple(tensors))}
    manifest, data = seal(
        Manifest(
            channel_id="bench", epoch=1, number=number or seed, nonce=uuid.uuid4().hex[:8], run_id="bench", created=0.0,
            digest=DEFAULT, content_digest=combined_content(tracks), tracks=tracks,
        )
    )  # fmt: skip
    with open(os.path.join(folder, SELF_COPY), "wb") as file:
        file.write(data)
    return StagedVersion(manifest=manifest, folder=folder)


def config_of(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": False,
        "bos_token_id": 1, "eos_token_id": 2, **shape,
    }  # fmt: skip


def write_json(folder: str, name: str, content: dict[str, Any]) -> None:
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file)


class Engine:
    """vLLM in this process; `more` are arguments of its LLM."""

    def __init__(self, folder: str, args: argparse.Namespace, **more: Any) -> None:
        if not torch.cuda.is_available():
            import vllm._custom_ops as ops

            ops._supports_onednn = False  # packed layers have no plan
        from vllm import LLM

        from watchers.vllm_plugin.register import register

        register()
        graphs = {"enforce_eager": True}
        if args.graphs:
            graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}  # type: ignore[dict-item]
        memory = {"gpu_memory_utilization": 0.4} if torch.cuda.is_available() else {}
        self.llm: Any = LLM(
            folder, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=8, dtype="bfloat16",
            weight_transfer_config={"backend": "ckptsync"}, **graphs, **memory, **more,
        )  # fmt: skip
        self.worker = self._find_worker()
        self.engine = self.worker.weight_transfer_engine

    def _find_worker(self) -> Any:
        core: Any = self.llm.llm_engine
        executor = getattr(core, "model_executor", None) or core.engine_core.engine_core.model_executor
        driver = executor.driver_worker
        return getattr(driver, "worker", None) or driver

    def outputs(self) -> Any:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
        self.llm.reset_prefix_cache()
        found = self.llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], greedy, use_tqdm=False)
        tokens = [list(each.outputs[0].token_ids) for each in found]
        logprobs = [[next(iter(at.values())).logprob for at in each.outputs[0].logprobs] for each in found]
        return tokens, logprobs

    def prepare(self, version: StagedVersion) -> None:
        ready = threading.Event()
        self.engine.live.prepare(version, ready.set)
        if not ready.wait(600):
            raise SystemExit("prepare did not end within 600 s")

    def update(self, version: StagedVersion) -> None:
        info = {
            "folder": version.folder,
            "manifest_digest": version.manifest.manifest_digest,
            "label": version.label,
        }
        self.llm.collective_rpc("start_weight_update")
        self.llm.collective_rpc("update_weights", kwargs={"update_info": info})
        self.llm.collective_rpc("finish_weight_update")

    def stock(self, version: StagedVersion) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": version.folder})


def measure(args: argparse.Namespace, result: dict[str, Any]) -> tuple[Engine, StagedVersion]:
    """All but the change. The engine, and the version that it holds then."""
    folders = [os.path.join(args.work, name) for name in "ab"]
    a, b = (make_version(folder, SHAPES[args.shape], i, DEVICE) for i, folder in enumerate(folders, 1))
    nbytes = sum(entry.spec.nbytes for entry in a.manifest.tracks["model"].tensors)
    note(result, shape=args.shape, bytes=nbytes, device=device_name(), **library_versions())
    # Before vLLM takes its share of the memory.
    note(result, limit=copy_limit(nbytes, args.rounds))
    if args.change:
        note(result, crossover=crossover(DEVICE))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    engine = Engine(a.folder, args)
    of_a = engine.outputs()
    note(result, stock_all=[seconds(lambda v=v: engine.stock(v)) for v in (b, a, b)])
    of_b = engine.outputs()
    note(result, first_update=seconds(lambda: engine.update(a)))
    first = engine.engine.outcome
    note(result, first_path=first.path, first_proof=first.proof)
    plan = engine.engine.live._plan
    if plan is None:
        raise SystemExit(f"no plan: {engine.engine.live._why}")
    note(result, copies=len(plan.copies), plan_seconds=plan_seconds(engine, plan))
    note(result, **rounds(engine, (b, a), args.rounds))
    note(result, copies_alone=copies_alone(engine, plan, b, args.rounds))
    note(result, proof_alone=in_worker.proof_alone(engine.worker, args.rounds))
    engine.update(b)
    note(result, **compare("outputs_b_equal_stock", engine.outputs(), of_b))
    engine.update(a)
    note(result, **compare("outputs_a_equal_start", engine.outputs(), of_a))
    note(result, versions_differ=of_a[0] != of_b[0])
    return engine, a


def plan_seconds(engine: Engine, plan: Any) -> float:
    from watchers.live.copy_plan import trace

    return seconds(lambda: trace(engine.engine.live.model, plan.layouts))


def copies_alone(engine: Engine, plan: Any, version: StagedVersion, count: int) -> float:
    """The plan's copies from the pinned pieces, without a proof or a call to a worker."""
    from watchers.live.copy_plan import apply, targets_of

    live = engine.engine.live
    targets = targets_of(live.model)
    found = live._payload.of(version.folder, plan, targets, live._checked(version), pinned=torch.cuda.is_available())
    return min(seconds(lambda: apply(plan, targets, found.pieces)) for _ in range(count + 1))


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def library_versions() -> dict[str, str]:
    import vllm

    return {"vllm": str(getattr(vllm, "__version__", "unknown")), "torch": torch.__version__}


def judged(result: dict[str, Any]) -> dict[str, Any]:
    pause, stock = statistics.median(result["pause_all"]), statistics.median(result["stock_all"])
    result |= {"pause": pause, "stock": stock, "proof": statistics.median(result["proof_all"])}
    result |= {"pause_over_limit": pause / result["limit"], "stock_over_pause": stock / pause}
    bars = {
        "outputs": result["outputs_b_equal_stock"] and result["outputs_a_equal_start"] and result["versions_differ"],
    }
    if torch.cuda.is_available():
        bars |= {
            "pause <= 1.15 x limit": result["pause_over_limit"] <= 1.15,
            "stock >= 5 x pause": result["stock_over_pause"] >= 5,
            "proof <= 50 ms": result["proof"] <= 0.050,
        }
    result["bars"] = bars
    return result


def table(result: dict[str, Any]) -> str:
    gb = result["bytes"] / 1e9
    rows = [
        ("limit: pinned copy", result["limit"]),
        ("plan: start, update with proof, finish", result["pause"]),
        ("  of which in the worker's update", statistics.median(result["inside_all"])),
        ("  of which the read-back proof, beyond the copies", result["proof"]),
        ("  the plan's copies alone, best", result["copies_alone"]),
        ("  the proof alone, best", result["proof_alone"]),
        ("stock reload_weights", result["stock"]),
        ("before the pause: prepare (pinned)", statistics.median(result["prepare_all"])),
        ("once: plan", result["plan_seconds"]),
        ("once: first update, reload and proof", result["first_update"]),
    ]
    lines = [f"{result['device']}, vLLM {result['vllm']}, torch {result['torch']}, {gb:.2f} GB bf16", ""]
    lines += ["| | seconds | GB/s |", "|---|---|---|"]
    lines += [f"| {name} | {value:.4f} | {gb / value:.1f} |" for name, value in rows]
    lines += ["", f"pause / limit {result['pause_over_limit']:.2f}, stock / pause {result['stock_over_pause']:.1f}"]
    for name in ("outputs_b_equal_stock", "outputs_a_equal_start"):
        lines.append(f"{name}: {result[name]}, logprobs differ by at most {result[name + '_logprob_difference']:.2g}")
    return "\n".join([*lines, *(f"{'met   ' if met else 'MISSED'} {bar}" for bar, met in result["bars"].items())])


def main() -> int:
    parser = argparse.ArgumentParser(description="The pause for a full version on a real GPU.")
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--work", default="/dev/shm/gpu-pause")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs for decoding")
    parser.add_argument("--change", type=float, default=0.0, help="share of elements that differ, such as 0.01")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    in_worker.arrange()
    result: dict[str, Any] = {}
    shutil.rmtree(args.work, ignore_errors=True)
    os.makedirs(args.work)
    try:
        engine, held = measure(args, result)
        print(table(judged(result)), flush=True)
        if args.change:
            folder = os.path.join(args.work, "change")
            other = make_version(folder, SHAPES[args.shape], 1, DEVICE, number=3, change=args.change)
            measure_change(engine, held, other, args, result)
            print(change_table(result), flush=True)
    finally:
        shutil.rmtree(args.work, ignore_errors=True)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
    return 0 if all(result["bars"].values()) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # vLLM's threads may hold up a normal exit
