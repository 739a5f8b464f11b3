"""Putting the same question to any of the engines, over its own HTTP API."""

from __future__ import annotations

from typing import Any

import httpx

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
"""SmolLM2's chat template, written out: every engine then sees the same tokens."""


def ask(engine: str, url: str, model_name: str = "m") -> str:
    """The engine's greedy answer, one line. Raises httpx.HTTPError."""
    if engine == "module":
        body = {"prompt": PROMPT, "max_new_tokens": 12}
        text = _post(f"{url}/generate", body)["text"]
    elif engine == "vllm":
        body = {"model": model_name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        text = _post(f"{url}/v1/completions", body)["choices"][0]["text"]
    else:
        body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
        text = _post(f"{url}/generate", body)["text"]
    return str(text).strip().splitlines()[0] if str(text).strip() else ""


def _post(url: str, body: dict[str, object]) -> Any:
    answer = httpx.post(url, json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()
