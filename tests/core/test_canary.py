"""What a version says to a probe prompt: in the manifest, of a model, and against an engine."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ckptsync.canary import MAX_TOKENS, Canary, record, score
from ckptsync.canonical import canonical
from ckptsync.errors import BadManifest, InvalidInput
from ckptsync.manifest import decode

from .manifests import manifest
from .test_manifest import edited

GOOD = {"prompt_ids": (1, 2), "output_ids": (3, 4), "logprobs": (-0.5, -1.0), "atol": 0.1}


def test_a_manifest_carries_it_and_one_without_has_no_such_field() -> None:
    canary = Canary(**GOOD)
    data = canonical(msgspec.to_builtins(manifest(canary=canary)))
    assert decode(data).canary == canary
    without = canonical(msgspec.to_builtins(manifest()))
    assert "canary" not in json.loads(without)
    assert canonical(msgspec.to_builtins(decode(without))) == without


WRONG = [
    ("prompt_ids", (), "at least one"),
    ("output_ids", (-1, 4), "token ids"),
    ("output_ids", (1 << 31, 4), "token ids"),
    ("prompt_ids", (1.5,), "prompt_ids"),
    ("prompt_ids", (7,) * MAX_TOKENS, "more than"),
    ("logprobs", (-0.5,), "1 logprobs for 2"),
    ("logprobs", (-0.5, 0.1), "no log-probability"),
    ("atol", 0.0, "greater than 0"),
]


@pytest.mark.parametrize(("field", "value", "why"), WRONG)
def test_one_that_cannot_be_meant_is_refused_where_it_is_made_and_where_it_is_read(
    field: str, value: Any, why: str
) -> None:
    with pytest.raises(InvalidInput, match=why):
        Canary(**{**GOOD, field: value})
    with pytest.raises(BadManifest):
        decode(edited(canary={**GOOD, field: value}))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_numbers_that_json_has_not_are_refused(value: float) -> None:
    with pytest.raises(InvalidInput, match="finite"):
        Canary(**{**GOOD, "logprobs": (value, -1.0)})
    with pytest.raises(InvalidInput, match="atol"):
        Canary(**{**GOOD, "atol": value})


def test_the_verdict_names_the_first_position_and_both_values() -> None:
    canary = Canary(**GOOD)
    assert canary.difference([-0.55, -0.95]) == ""
    said = canary.difference([-0.5, -2.0])
    assert "output position 1 (token 4)" in said
    assert "is -2.0000 and the recorded one -1.0000" in said
    assert "output position 0" in canary.difference([float("nan"), -1.0])
    assert "1 log-probabilities came for 2" in canary.difference([-0.5])


class Bigram(nn.Module):
    """The next token's logits depend on the last token alone; a dropout that would show."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(table)
        self.dropout = nn.Dropout(0.9)
        self.frozen = nn.Dropout(0.9).eval()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.frozen(self.dropout(self.table(input_ids))))


TABLE = torch.tensor([[0.0, 2.0, 1.0], [0.0, 0.0, 3.0], [1.0, 0.5, 0.0]])


def test_record_is_greedy_and_leaves_every_module_in_its_mode() -> None:
    model = Bigram(TABLE)
    canary = record(model, [0], max_new_tokens=3)
    assert canary.output_ids == (1, 2, 0)
    expected = [float(torch.log_softmax(TABLE[last], -1)[token]) for last, token in ((0, 1), (1, 2), (2, 0))]
    assert canary.logprobs == pytest.approx(expected)
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
    assert canary.difference(score(model.eval(), canary.token_ids, 1)) == ""


def test_a_near_tie_that_another_kernel_decides_otherwise_passes() -> None:
    tie = torch.tensor([[0.0, 1.0, 1.0005], [1.0005, 1.0, 0.0], [0.0, 1.0, 1.0005]])
    rounded = tie.bfloat16().float()
    one, other = record(Bigram(tie), [0], max_new_tokens=4), record(Bigram(rounded), [0], max_new_tokens=4)
    assert one.output_ids != other.output_ids, "else there is nothing to see"
    assert one.difference(score(Bigram(rounded).eval(), one.token_ids, 1)) == ""


def test_record_refuses_what_is_no_prompt() -> None:
    for prompt, count in (([], 3), ([0], 0)):
        with pytest.raises(InvalidInput):
            record(Bigram(TABLE), prompt, max_new_tokens=count)
