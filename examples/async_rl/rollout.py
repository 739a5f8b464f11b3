"""Rollout actors: each owns an inference server, samples answers from it, and grades them."""

from __future__ import annotations

import math
import os
import random
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import ray
from transformers import AutoTokenizer

from ckptsync.demo.processes import Child, free_port, wait_until

Answer = tuple[list[int], list[float], str]
"""Tokens, their log-probabilities by the policy that sampled them, and the label of that policy."""


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: int


@dataclass(frozen=True)
class Sample:
    """One answer. `version` is what the engine said that it was sampled by: the label of the oldest version that had a
    part in it, empty for the weights that the server was started with."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    version: str
    reward: float
    advantage: float


def problems(count: int) -> list[Problem]:
    sums = [(random.randint(1, 9), random.randint(1, 9)) for _ in range(count)]
    return [Problem(f"What is {a} plus {b}? Answer with the number only.", a + b) for a, b in sums]


def reward(text: str, answer: int) -> float:
    """The share of characters that are digits, and 1 more for the right answer and nothing else."""
    digits = sum(character.isdigit() for character in text)
    return digits / max(1, len(text)) + (text.strip() == str(answer))


def advantages(rewards: Sequence[float]) -> list[float]:
    """Of each answer against the others to the same problem."""
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in rewards) / len(rewards))
    return [(each - mean) / (deviation + 1e-4) for each in rewards]


@ray.remote(num_cpus=1, resources={"rollout": 1})
class Rollout:
    """`serve` starts the server: a command to which the model's folder and a port are added."""

    def __init__(self, kind: str, serve: str, model: str, max_tokens: int) -> None:
        self.ask, self.model, self.max_tokens = SAMPLERS[kind], model, max_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        log = os.path.join(tempfile.gettempdir(), f"ckptsync-rollout-{port}.log")
        self.server = Child("server", [*shlex.split(serve), model, "--port", str(port)], log)

    def ready(self, seconds: float) -> str:
        """The server's url, once it answers."""
        wait_until(self._answers, self.server, seconds)
        return self.url

    def rollout(self, asked: Sequence[Problem], group: int) -> list[Sample]:
        """`group` answers to each problem."""
        return [sample for problem in asked for sample in self._group(problem, group)]

    def stop(self) -> None:
        self.server.stop()
        os.remove(self.server.log)

    def _group(self, problem: Problem, group: int) -> list[Sample]:
        chat = [{"role": "user", "content": problem.prompt}]
        text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        prompt = self.tokenizer(text, add_special_tokens=False).input_ids
        answers = self.ask(self.url, prompt, group, self.max_tokens)
        texts = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _, _ in answers]
        rewards = [reward(text, problem.answer) for text in texts]
        return [
            Sample(prompt, *answer, reward=gained, advantage=better)
            for answer, gained, better in zip(answers, rewards, advantages(rewards), strict=True)
        ]

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/openapi.json", timeout=5, trust_env=False).status_code < 500
        except httpx.TransportError:
            return False


def sample_vllm(url: str, prompt: list[int], count: int, max_tokens: int) -> list[Answer]:
    """vLLM >= 0.32 says which weights sampled which tokens; a request that was kept over an update has two spans."""
    sampling = {"n": count, "max_tokens": max_tokens, "temperature": 1.0, "top_p": 1.0, "logprobs": 1}
    body = {"token_ids": prompt, "sampling_params": sampling}
    choices = _post(f"{url}/inference/v1/generate", body)["choices"]
    return [_of_choice(choice) for choice in choices]


def _of_choice(choice: dict[str, Any]) -> Answer:
    oldest = choice["weight_versions"][0]["version"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs, "" if oldest == "default" else oldest


def sample_embedded(url: str, prompt: list[int], count: int, max_tokens: int) -> list[Answer]:
    body = {"token_ids": prompt, "max_new_tokens": max_tokens, "temperature": 1.0}
    found = [_post(f"{url}/generate", body) for _ in range(count)]
    return [(each["token_ids"], each["logprobs"], each["version"]) for each in found]


def _post(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url, json=body, timeout=600, trust_env=False)
    answer.raise_for_status()
    return answer.json()


SAMPLERS: dict[str, Callable[[str, list[int], int, int], list[Answer]]] = {
    "vllm": sample_vllm,
    "embedded": sample_embedded,
}
