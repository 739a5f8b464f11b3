"""Asking an engine what its model computes: log-probabilities of given tokens, and greedy tokens.

Both engines leave their prefix cache alone for log-probabilities of a prompt that are wanted from its first token on
(vLLM 0.32: `skip_reading_prefix_cache`; SGLang 0.5.23: `logprob_start_len` bounds the match), so that no KV of other
weights is in the answer, whatever the cache policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptsync.engine_http import Call, EngineHttp


class VllmProbe:
    """For an adapter with an `http` side: vLLM's completions route, on tokens."""

    http: EngineHttp

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        """EngineRefused if it does not answer with log-probabilities, such as for more tokens than it takes."""
        # One token is generated and thrown away: without `echo` none is not allowed.
        call, choice = self._complete("score", token_ids, max_tokens=1, prompt_logprobs=0)
        try:
            rows = choice["prompt_logprobs"]
            return [float(rows[at][str(token_ids[at])]["logprob"]) for at in range(first, len(token_ids))]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self.http.failure(call, f"answered without log-probabilities of the prompt ({error!r})") from error

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        call, choice = self._complete("generate", token_ids, max_tokens=count, return_token_ids=True, ignore_eos=True)
        found = choice.get("token_ids")
        if not isinstance(found, list):
            raise self.http.failure(call, "answered without token_ids")
        return [int(token) for token in found]

    def _base_models(self, step: str) -> list[dict[str, Any]]:
        """What it lists as served, without the adapters."""
        call = Call(step=step, method="GET", path="/v1/models")
        models = self.http.json_object(call).get("data")
        if not isinstance(models, list):
            raise self.http.failure(call, "answered without a list of models")
        return [model for model in models if isinstance(model, dict) and not model.get("parent")]

    def _complete(self, step: str, token_ids: Sequence[int], **more: object) -> tuple[Call, dict[str, Any]]:
        served = self._base_models(step)
        call = Call(
            step=step,
            method="POST",
            path="/v1/completions",
            json={"model": served[0].get("id") if served else "", "prompt": list(token_ids), "temperature": 0, **more},
            timeout=self.http.options.pause_timeout,  # whoever waited for the resume is computed first
        )
        choices = self.http.json_object(call).get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self.http.failure(call, "answered without choices")
        return call, choices[0]


class SglangProbe:
    """For an adapter with an `http` side: SGLang's own generate route, on tokens."""

    http: EngineHttp

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        """EngineRefused if it does not answer with log-probabilities, such as for more tokens than it takes."""
        call, body = self._generate("score", token_ids, 1, return_logprob=True, logprob_start_len=0)
        try:
            rows = body["meta_info"]["input_token_logprobs"][first:]
            if [row[1] for row in rows] != list(token_ids[first:]):
                raise self.http.failure(call, "answered with log-probabilities of other tokens")
            return [float(row[0]) for row in rows]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self.http.failure(call, f"answered without log-probabilities of the prompt ({error!r})") from error

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        call, body = self._generate("generate", token_ids, count)
        found = body.get("output_ids")
        if not isinstance(found, list):
            raise self.http.failure(call, "answered without output_ids")
        return [int(token) for token in found]

    def _generate(self, step: str, token_ids: Sequence[int], count: int, **more: object) -> tuple[Call, dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        call = Call(
            step=step,
            method="POST",
            path="/generate",
            json={"input_ids": list(token_ids), "sampling_params": sampling, **more},
            timeout=self.http.options.pause_timeout,  # whoever waited for the resume is computed first
        )
        return call, self.http.json_object(call)
