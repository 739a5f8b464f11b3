"""What can be said of the plugin without SGLang: what travels, when it travels, and which models are plain."""

from __future__ import annotations

import base64
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptsync.errors import InvalidInput
from watchers.sglang_plugin.announcement import LOADER, NAME, Announcement, decode, encode
from watchers.sglang_plugin.derived import holds_more_than_parameters
from watchers.sglang_plugin.register import add_loader

WORDS = Announcement(
    folder="/stage/ü/e1-v7", manifest_digest="d", label="e1-v7", receipts="/r", serves="e1-v6", mailbox="/m"
)


def test_an_announcement_arrives_as_one_uint8_tensor_and_comes_back() -> None:
    [(name, tensor)] = tensors = pickle.loads(base64.b64decode(encode(WORDS)))
    assert (name, tensor.dtype, tensor.dim()) == (NAME, torch.uint8, 1)
    assert decode(tensors) == WORDS


@pytest.mark.parametrize(
    "tensors", [[], [("model.norm.weight", torch.ones(2))], [(NAME, torch.zeros(3, dtype=torch.uint8))]]
)
def test_tensors_of_somebody_else_are_refused(tensors: Any) -> None:
    with pytest.raises(InvalidInput, match=r"sglang-plugin|ckptsync\.announcement"):
        decode(tensors)


@pytest.mark.parametrize("before", [None, [], ["other.load"], ["other.load", LOADER]])
def test_the_loader_is_added_once_beside_others(before: list[str] | None) -> None:
    arguments = SimpleNamespace(custom_weight_loader=before)
    for _ in range(2):
        add_loader(arguments)
    assert arguments.custom_weight_loader.count(LOADER) == 1
    assert set(before or []) <= set(arguments.custom_weight_loader)


class UnquantizedLinearMethod: ...


class UnquantizedFusedMoEMethod: ...


class Fp8LinearMethod: ...


def layer(**attributes: Any) -> torch.nn.Module:
    """A model with one linear layer that has these attributes."""
    linear = torch.nn.Linear(2, 2)
    for name, value in {"quant_method": UnquantizedLinearMethod(), **attributes}.items():
        setattr(linear, name, value)
    return torch.nn.Sequential(linear)


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({}, ""),
        ({"quant_method": UnquantizedFusedMoEMethod()}, ""),
        ({"quant_method": Fp8LinearMethod()}, "as Fp8LinearMethod does"),
        ({"use_intel_amx_backend": True}, "packed"),
        ({"post_load_weights": print}, "derives"),
        ({"w_kc": torch.ones(1)}, "a tensor w_kc beside"),
    ],
)
def test_a_layer_that_computes_from_more_than_its_parameters_is_named(attributes: dict[str, Any], why: str) -> None:
    found = holds_more_than_parameters(layer(**attributes))
    assert why in found
    assert bool(found) == bool(why)
