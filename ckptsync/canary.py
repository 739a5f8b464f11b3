"""A canary: what a version says to a probe prompt, recorded by the trainer and replayed on the live engine.

    ids = tokenizer("The capital of France is").input_ids
    publisher.publish(model, step=step, canary=record(model, ids, max_new_tokens=16))

Digests prove which weights an engine holds; a canary proves that it computes with them what the trainer does. Wrong
rope settings, scales or kernels pass every digest.

The verdict is made over log-probabilities of a fixed continuation, each token given all before it (teacher forced),
and not over the tokens that an engine would choose: at a near tie another kernel chooses otherwise, and from there on
every token differs though nothing is wrong. Importing this needs no torch; `record` and `score` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn

MAX_TOKENS = 4096
"""Prompt and output together."""

ATOL = 0.15
"""Between two implementations of one bf16 model; see `docs/design/0012-proof.md` for what was measured."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A probe prompt and what follows. InvalidInput, naming the field, for a value that cannot be meant."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """What the trainer's model said, greedily."""

    logprobs: tuple[float, ...]
    """Natural logarithm of the probability of each of `output_ids`, given everything before it, at temperature 1."""

    atol: float = ATOL
    """By how much an engine's log-probability may differ, at each position."""

    def __post_init__(self) -> None:
        """A ValueError in here is a ValidationError where a manifest is parsed."""
        _check_ids("prompt_ids", self.prompt_ids)
        _check_ids("output_ids", self.output_ids)
        if len(self.token_ids) > MAX_TOKENS:
            raise InvalidInput(f"canary: {len(self.token_ids)} tokens are more than {MAX_TOKENS}")
        if len(self.logprobs) != len(self.output_ids):
            raise InvalidInput(f"canary: {len(self.logprobs)} logprobs for {len(self.output_ids)} output_ids")
        if wrong := [value for value in self.logprobs if not (math.isfinite(value) and value <= 0)]:
            raise InvalidInput(f"canary: {wrong[0]!r} is no log-probability: finite and at most 0")
        if not (math.isfinite(self.atol) and self.atol > 0):
            raise InvalidInput(f"canary: atol={self.atol!r}: must be greater than 0")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt, then the output."""
        return (*self.prompt_ids, *self.output_ids)

    def difference(self, found: Sequence[float]) -> str:
        """Where an engine's log-probabilities of `output_ids` first differ by more than `atol`; empty if nowhere."""
        if len(found) != len(self.logprobs):
            return f"{len(found)} log-probabilities came for {len(self.logprobs)} tokens"
        for position, (theirs, ours) in enumerate(zip(found, self.logprobs, strict=True)):
            if not abs(theirs - ours) <= self.atol:  # a NaN differs
                return (
                    f"at output position {position} (token {self.output_ids[position]}) the engine's log-probability "
                    f"is {theirs:.4f} and the recorded one {ours:.4f}, more than {self.atol:g} apart"
                )
        return ""


def _check_ids(name: str, ids: Sequence[int]) -> None:
    if not ids or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise InvalidInput(f"canary: {name} must be token ids, at least one")


def record(model: nn.Module, prompt_ids: Sequence[int], *, max_new_tokens: int = 16, atol: float = ATOL) -> Canary:
    """The canary of a causal language model whose call answers with `.logits`, as those of transformers do.

    Greedy, one forward pass for each token and one more. The model is put into evaluation mode meanwhile, and every
    submodule back into its own after. With a sharded model call it on every rank, as any forward pass. Record in
    the dtype that is published: what a cast changes counts against `atol`.
    """
    import torch

    if max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens={max_new_tokens}: must be 1 or more")
    _check_ids("prompt_ids", prompt_ids)
    tokens = list(prompt_ids)
    with _evaluating(model), torch.no_grad():
        for _ in range(max_new_tokens):
            tokens.append(int(_logits(model, tokens)[-1].argmax()))
        logprobs = score(model, tokens, len(prompt_ids))
    output = tokens[len(prompt_ids) :]
    return Canary(prompt_ids=tuple(prompt_ids), output_ids=tuple(output), logprobs=tuple(logprobs), atol=atol)


def score(model: nn.Module, token_ids: Sequence[int], first: int) -> list[float]:
    """Natural log-probabilities of `token_ids[first:]`, each given all tokens before it, computed in float32."""
    import torch

    with torch.no_grad():
        logprobs = torch.log_softmax(_logits(model, token_ids)[first - 1 : -1].float(), dim=-1)
        wanted = torch.tensor(token_ids[first:], device=logprobs.device)
        return [float(value) for value in logprobs.gather(1, wanted[:, None])[:, 0]]


def _logits(model: nn.Module, token_ids: Sequence[int]) -> Any:
    """(tokens, vocabulary)."""
    import torch

    device = next(model.parameters()).device
    return model(input_ids=torch.tensor([list(token_ids)], device=device)).logits[0]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Not `train(was)`, which would also wake what a trainer has frozen."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
