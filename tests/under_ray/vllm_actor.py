"""A real vLLM inside an actor; runs under the engine environment's python, with this one's Ray beside it."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from tests.vllm_plugin import overlay
from watchers.ray import EngineActor
from watchers.vllm_plugin.llm_engine import LlmEngine

import make  # isort: skip - found through overlay
import measured  # isort: skip
import serve  # isort: skip

PROMPT = [1, 2, 3, 4, 5]
MISSING = ("ray", "msgpack")
"""Of what Ray needs, the engine's environment has all but these."""


class VllmRollout(EngineActor):
    def __init__(self, model: str) -> None:
        import vllm

        self.llm = vllm.LLM(
            model, enforce_eager=True, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8,
            weight_transfer_config={"backend": "ckptsync"},
        )  # fmt: skip
        self.engine = LlmEngine(self.llm, name="vllm in an actor")

    def rollout(self) -> tuple[str, list[int]]:
        """The label, and the tokens that were computed with it."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        with self.engine.gate:
            output = self.llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)[0]
            return self.engine.status().label, list(output.outputs[0].token_ids)


def environment(folder: str) -> dict[str, Any]:
    """Ray's runtime environment for such an actor. The same Ray as here, not one more copy of it: the versions must be
    equal, and it is the one build for this Python."""
    beside = os.path.join(folder, "beside")
    os.makedirs(beside)
    for name in MISSING:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations
        os.symlink(spec.submodule_search_locations[0], os.path.join(beside, name))
    entry_points = os.path.join(folder, "entry-points")
    os.makedirs(entry_points)
    variables = serve.environment("vllm", {}) | {
        "PYTHONPATH": os.pathsep.join([overlay.python_path(measured.on_path(entry_points)), beside]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "CKPTSYNC_TEST_UNPACKED": "1",
    }
    return {"py_executable": make.ensure("vllm"), "env_vars": variables}
