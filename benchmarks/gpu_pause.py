"""The pause for a full version on a real GPU: copy plan against stock `reload_weights` and the pinned-copy limit.

    python -m benchmarks.gpu_pause [--shape 4b|tiny] [--work /dev/shm/gpu-pause] [--rounds 5] [--json FILE]

Runs vLLM in this process with the plugin registered, on two random versions of one Qwen3 shape. In one run:

- limit    one pinned buffer of the model's size to the device, best of the rounds
- stock    `reload_weights` of the same files from --work, which should be in memory (/dev/shm)
- plan     start, update, finish through the plugin, after `prepare` has gathered the pinned pieces, with the
           read-back proof inside; the proof's own time is also shown alone
- outputs  greedy tokens and logprobs after each, which must be equal for equal weights

Needs vLLM >= 0.26 with its dependencies, xxhash and tenacity. For a machine without a network, a folder to put on
PYTHONPATH there:

    pip install --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \\
        --target extra xxhash tenacity

Exit status 1 if the outputs differ or, on CUDA, if a bar is missed: plan <= 1.15 x limit, stock >= 5 x plan,
proof <= 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch

from ckptsync.digest import DEFAULT, digest
from ckptsync.engine import StagedVersion
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import FileEntry, Manifest, TensorEntry, Track, combined_content, seal
from ckptsync.shards.tensors import spec_of, tensor_bytes

SHAPES = {
    "4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 288, "tie_word_embeddings": True,
    },
}  # fmt: skip
SHARD = 2 << 30
PROMPTS = ([1, 2, 3, 4, 5], [200, 100, 50, 25], [7 * i % 251 for i in range(300)])


def layers_of(shape: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in model order."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (shape["vocab_size"], hidden))]
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}."
        found += [
            (at + "input_layernorm.weight", (hidden,)),
            (at + "self_attn.q_proj.weight", (q, hidden)),
            (at + "self_attn.k_proj.weight", (kv, hidden)),
            (at + "self_attn.v_proj.weight", (kv, hidden)),
            (at + "self_attn.o_proj.weight", (hidden, q)),
            (at + "self_attn.q_norm.weight", (head,)),
            (at + "self_attn.k_norm.weight", (head,)),
            (at + "post_attention_layernorm.weight", (hidden,)),
            (at + "mlp.gate_proj.weight", (inner, hidden)),
            (at + "mlp.up_proj.weight", (inner, hidden)),
            (at + "mlp.down_proj.weight", (hidden, inner)),
        ]
    return [*found, ("model.norm.weight", (hidden,))]


def make_version(folder: str, shape: dict[str, Any], number: int, device: str) -> StagedVersion:
    """A random checkpoint with the manifest that a stage seals."""
    from safetensors.torch import save_file

    os.makedirs(folder)
    generator = torch.Generator(device).manual_seed(number)
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
        shard[name] = values.to(torch.bfloat16).cpu()
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD:
            flush()
    flush()
    write_json(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder, "config.json", config_of(shape))
    tracks = {"model": Track(files=tuple(files), tensors=tuple(tensors))}
    manifest, data = seal(
        Manifest(
            channel_id="bench", epoch=1, number=number, nonce=uuid.uuid4().hex[:8], run_id="bench", created=0.0,
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


class Engine:
    """vLLM in this process."""

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
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
            weight_transfer_config={"backend": "ckptsync"}, **graphs, **memory,
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shutil.rmtree(args.work, ignore_errors=True)
    os.makedirs(args.work)
    a, b = (make_version(os.path.join(args.work, n), SHAPES[args.shape], i, device) for i, n in enumerate("ab", 1))
    nbytes = sum(entry.spec.nbytes for entry in a.manifest.tracks["model"].tensors)
    result: dict[str, Any] = {"shape": args.shape, "bytes": nbytes, "device": device_name(), **library_versions()}
    # Before vLLM takes its share of the memory.
    result["limit"] = copy_limit(nbytes, args.rounds)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    engine = Engine(a.folder, args)
    of_a = engine.outputs()
    result["stock_all"] = [seconds(lambda v=v: engine.stock(v)) for v in (b, a, b)]
    of_b = engine.outputs()
    result["first_update"] = seconds(lambda: engine.update(a))
    first = engine.engine.outcome
    result["first_path"], result["first_proof"] = first.path, first.proof
    plan = engine.engine.live._plan
    if plan is None:
        raise SystemExit(f"no plan: {engine.engine.live._why}")
    result["copies"] = len(plan.copies)
    result["plan_seconds"] = plan_seconds(engine, plan)
    rounds(engine, (b, a), args.rounds, result)
    result["proof_alone"] = proof_alone(engine, plan, args.rounds)
    engine.update(b)
    compare(result, "outputs_b_equal_stock", engine.outputs(), of_b)
    engine.update(a)
    compare(result, "outputs_a_equal_start", engine.outputs(), of_a)
    result["versions_differ"] = of_a[0] != of_b[0]
    return result


def compare(result: dict[str, Any], name: str, found: Any, expected: Any) -> None:
    """Tokens must be equal; how far the logprobs are apart is reported, since not every kernel is deterministic."""
    (tokens, logprobs), (others, other_logprobs) = found, expected
    result[name] = tokens == others
    pairs = ((x, y) for a, b in zip(logprobs, other_logprobs, strict=True) for x, y in zip(a, b, strict=True))
    result[name + "_logprob_difference"] = max(abs(x - y) for x, y in pairs)


def rounds(engine: Engine, versions: tuple[StagedVersion, StagedVersion], count: int, result: dict[str, Any]) -> None:
    pauses, proofs, prepares = [], [], []
    for i in range(2 * count):
        version = versions[i % 2]
        prepares.append(seconds(lambda v=version: engine.prepare(v)))
        pauses.append(seconds(lambda v=version: engine.update(v)))
        outcome = engine.engine.outcome
        if outcome.path != "plan":
            raise SystemExit(f"round {i} took the {outcome.path}: {outcome.why}")
        proofs.append(outcome.proof_seconds)
    result |= {"proof_kind": outcome.proof, "pause_all": pauses, "proof_all": proofs, "prepare_all": prepares}


def plan_seconds(engine: Engine, plan: Any) -> float:
    from watchers.vllm_plugin.copy_plan import trace

    return seconds(lambda: trace(engine.engine.live.model, plan.layouts))


def proof_alone(engine: Engine, plan: Any, count: int) -> float:
    """Sums of all live values, without waiting for copies."""
    from watchers.vllm_plugin.copy_plan import targets_of
    from watchers.vllm_plugin.readback import live_views, sums

    views = live_views(plan, targets_of(engine.engine.live.model))
    return min(seconds(lambda: sums(views).cpu()) for _ in range(count + 1))


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
        ("  of which the read-back proof", result["proof"]),
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
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    try:
        result = judged(measure(args))
    finally:
        shutil.rmtree(args.work, ignore_errors=True)
    print(table(result), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0 if all(result["bars"].values()) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # vLLM's threads may hold up a normal exit
