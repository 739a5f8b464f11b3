"""Real vLLMs of one process each, driven by lines of JSON; runs under the engine environment's python.

Its stdin is a socket. A message there is {"model": DIR, "packed": false, ...}, with three files, and starts one more
vLLM: a fork of this process, which has imported what a start needs once for all of them. From the first file that takes
one {"do": NAME, ...} per line; answers go as lines to the second, everything else to the third.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any, TextIO

from tests.envs import measured

IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)
PROMPTS = ([1, 2, 3, 4, 5], [200, 100, 50, 25], [7 * i % 251 for i in range(200)])


class Driver:
    def __init__(self, packed: bool = False, plain_experts: bool = False, **options: Any) -> None:
        import vllm._custom_ops as ops

        # oneDNN packs every linear layer and leaves its parameter empty; the fallback computes from the
        # parameters themselves, as a GPU does.
        if not packed:
            ops._supports_onednn = False
        if plain_experts:
            take_experts_as_loaded()
        from vllm import LLM

        sizes = {"max_model_len": 512, "max_num_seqs": 8}
        self.llm = LLM(**{"enforce_eager": True, "skip_tokenizer_init": True, **sizes, **options})
        executor: Any = self.llm.llm_engine.model_executor
        self.worker = executor.driver_worker.worker
        self.model = self.worker.model_runner.get_model()

    def tokens(self) -> list[list[int]]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        self.llm.reset_prefix_cache()
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def update(self, **update_info: str) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": update_info})
        self.llm.finish_weight_update(update_info["label"])

    def prepare(self, **init_info: str) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def label(self) -> str:
        return self.llm.get_weight_version()

    def start(self) -> None:
        self.llm.start_weight_update()

    def finish(self) -> None:
        self.llm.finish_weight_update()

    def reload(self, folder: str) -> None:
        """Stock: what vLLM does by itself."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def reload_due(self) -> None:
        self.llm.collective_rpc("reload_weights")

    def outcome(self) -> dict[str, Any]:
        outcome = self.worker.weight_transfer_engine.outcome
        fields = ("state", "path", "why", "proof")
        kind = outcome.error.kind if outcome.error else ""
        return {"error": str(outcome.error or ""), "kind": kind, **{field: getattr(outcome, field) for field in fields}}

    def plan(self) -> dict[str, Any]:
        plan = self.worker.weight_transfer_engine.live._plan
        return {"copies": len(plan.copies), "fills": len(plan.fills), "numel": plan.numel, "unread": plan.unread}

    def parameters(self) -> dict[str, Any]:
        parameters = list(self.model.named_parameters())
        return {
            "numel": sum(p.numel() for _, p in parameters),
            "empty": [name for name, p in parameters if not p.numel()],
            "addresses": [p.data_ptr() for _, p in parameters],
        }

    def digest(self) -> str:
        """Over everything that the model holds, as the engine holds it."""
        import hashlib

        import torch

        total = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            total.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return total.hexdigest()

    def break_load_at(self, name: str, shape: bool = False) -> None:
        """The engine's own load raises once when this tensor comes, or gets it with one row less; an empty name:
        in the next plan's copies."""
        import watchers.live.payload as payload_module

        original_load, original_apply = self.model.load_weights, payload_module.apply

        def load(weights: Any) -> Any:
            self.model.load_weights = original_load
            return original_load(breaking(weights))

        def breaking(weights: Any) -> Any:
            for each, tensor in weights:
                if each == name and shape:
                    yield each, tensor[:-1]
                    continue
                if each == name:
                    raise OSError(f"planted at {name}")
                yield each, tensor

        def apply(plan: Any, targets: Any, payload: Any) -> None:
            payload_module.apply = original_apply
            half = len(plan.copies) // 2
            for copy, values in list(zip(plan.copies, payload, strict=True))[:half]:
                copy.write.on(targets[copy.target]).copy_(values)
            raise OSError("planted in the middle of the copies")

        if name:
            self.model.load_weights = load
        else:
            payload_module.apply = apply

    def forget_plan(self) -> None:
        self.worker.weight_transfer_engine.live._plan = None

    def flip_after_copy(self) -> None:
        """The next plan's copies put one bit wrong."""
        import torch

        import watchers.live.payload as payload_module

        original = payload_module.apply

        def apply(plan: Any, targets: Any, payload: Any) -> None:
            payload_module.apply = original
            original(plan, targets, payload)
            targets["model.norm.weight"].view(torch.int16)[0] ^= 1

        payload_module.apply = apply


def take_experts_as_loaded() -> None:
    """As Triton's kernels on a GPU do, and none of this build: under their name, experts are computed by torch from the
    parameters themselves."""
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    class Plain(CPUUnquantizedExperts):
        def process_weights_after_loading(self, layer: Any) -> None:
            """Nothing is packed."""

        def apply(
            self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, **_: Any
        ) -> None:
            from torch.nn import functional

            output.zero_()
            for expert in range(len(w1)):
                tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
                gate, up = functional.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
                value = functional.linear(functional.silu(gate) * up, w2[expert])
                output.index_add_(0, tokens, (value * topk_weights[tokens, places, None]).to(output.dtype))

    method.select_unquantized_moe_backend = lambda **_: (UnquantizedMoeBackend.TRITON, Plain)


def serve(calls: TextIO, answers: TextIO, options: dict[str, Any]) -> None:
    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    driver = Driver(**options)
    say(ready=True)
    for line in calls:
        call = json.loads(line)
        try:
            say(value=getattr(driver, call.pop("do"))(**call))
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}")


def start(options: dict[str, Any], calls: int, answers: int, log: int) -> None:
    """In the fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, standard)
    measured.start()
    with os.fdopen(calls) as reading, os.fdopen(answers, "w") as writing:
        serve(reading, writing, options)


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(fileno=0) as door:
        while True:
            options, files, *_ = socket.recv_fds(door, 1 << 16, 3)
            if not options:
                return
            if not os.fork():
                try:
                    start(json.loads(options), *files)
                except BaseException:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(0)
            for file in files:
                os.close(file)


if __name__ == "__main__":
    main()
    os._exit(0)
