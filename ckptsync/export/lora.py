"""LoRA adapters of a PEFT model: as a PEFT directory that engines load as it is, or folded into the base weights.

The model may be sharded by FSDP2, compiled, or wrapped by DDP. PEFT itself is not imported: its layers are known
by what they hold (`base_layer`, `lora_A`, `scaling`). What one of the readers would take for something else is
refused by name, since all of them answer as if it had worked: SGLang knows one rank and one `alpha / r` for all
layers and no rank-stabilised scaling, vLLM neither DoRA nor biases, and none of them trained full modules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import InvalidInput, UnsupportedTensor
from ..manifest import MAIN_TRACK, TensorSpec
from .module import find_ties
from .names import clean_name, clean_names
from .stream import wire_dtype, wire_spec

PREFIX = "base_model.model."
"""In front of every name in a PEFT directory, and of a PeftModel's own names."""

_LORA = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)\.([^.]+)((?:\.weight)?)")
_OTHER = re.compile(r"(.+)\.(lora_[A-Za-z_]+|trainable_tokens_delta|trainable_tokens_original)(?:\.|$)")
_SAVED = re.compile(r"(.+)\.modules_to_save\.([^.]+)\.(.+)")
_ORIGINAL = re.compile(r"(.+)\.original_module\.(.+)")

_REMEDY = "publish it folded in, with kind='full' and merge_lora=True"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterExport:
    """A PEFT directory in the making: the tensors as PEFT names them, and the config file."""

    tensors: dict[str, torch.Tensor]
    config: bytes


def export_adapter(model: nn.Module, adapter: str = "default") -> AdapterExport:
    """One adapter, with the tensors still sharded as they are. UnsupportedTensor for what engines cannot load."""
    layers = _layers(model, adapter)
    tensors = {}
    for name, tensor in _state(model).items():
        found = _LORA.fullmatch(name)
        if found is not None:
            if found[3] == adapter:
                tensors[f"{PREFIX}{found[1].removeprefix(PREFIX)}.{found[2]}{found[4]}"] = tensor
        else:
            _refuse_more(name, adapter)
    return AdapterExport(tensors=tensors, config=_config(model, layers, adapter))


def base_of(model: nn.Module) -> nn.Module:
    """The model below PEFT, which knows the architecture's own name."""
    for part in model.modules():
        get_base = getattr(type(part), "get_base_model", None)
        if get_base is not None:
            base: nn.Module = get_base(part)
            return base
    return model


class MergedSource:
    """A WeightSource: the base model's tensors with one adapter folded in; the live module is not touched.

    Folded in float32 and rounded once, to the dtype on the wire. (PEFT's own merge rounds the product to the
    weight's dtype first, then the sum.) Trained full modules (`modules_to_save`) stand for the base's. Each rank
    holds one whole weight at a time.
    """

    def __init__(self, model: nn.Module, adapter: str = "default", dtype: torch.dtype | None = None) -> None:
        self._layers, self._dtype = _layers(model, adapter), dtype
        self._state = _state(model)
        self._adapter = adapter
        for name, layer in self._layers.items():
            _refuse_unfoldable(name, layer)
        self._plan = list(_merged_names(self._state, adapter))
        ties = find_ties({name: self._state[source] for name, source in self._plan})
        self._plan = [(name, source) for name, source in self._plan if name not in ties]

    def metadata(self) -> Sequence[TensorSpec]:
        return [wire_spec(name, self._state[source], self._dtype) for name, source in self._plan]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, source in self._plan:
            tensor = self._state[source].detach()
            layer = self._layers.get(source.removesuffix(".base_layer.weight"))
            if layer is None:
                yield name, tensor.to(wire_dtype(tensor, self._dtype))
            else:
                yield name, self._folded(tensor, layer)

    @torch.no_grad()
    def _folded(self, weight: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        down, up, transposed = _factors(layer, self._adapter)
        wide = torch.promote_types(weight.dtype, torch.float32)
        base, a, b = (_full(tensor).to(wide) for tensor in (weight, down, up))
        delta = (b @ a).T if transposed else b @ a
        folded = base + delta * _scaling(layer, self._adapter)
        return folded.to(wire_dtype(weight, self._dtype))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def _factors(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """A, B, and whether their product lies the other way round than the weight."""
    if adapter in layer.lora_A:
        transposed = getattr(layer, "fan_in_fan_out", False)
        return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, bool(transposed)
    return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter], True


def _scaling(layer: Any, adapter: str) -> float:
    return float(layer.scaling[adapter])


# -- what is in the model ------------------------------------------------------------------------------------


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    # As for a publish: FSDP2 goes back to its sharded parameters when it is asked for its state dict.
    state = model.state_dict(keep_vars=True)
    clean = clean_names(state).clean
    return {clean[name]: tensor for name, tensor in state.items()}


def _layers(model: nn.Module, adapter: str) -> dict[str, Any]:
    """Clean module name -> the layers that carry the adapter. InvalidInput, naming those there are, if none does."""
    layers = {clean_name(n): m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}
    known = {name for layer in layers.values() for name in (*layer.lora_A, *layer.lora_embedding_A)}
    carrying = {
        name: layer for name, layer in layers.items() if adapter in layer.lora_A or adapter in layer.lora_embedding_A
    }
    if not carrying:
        there = ", ".join(sorted(known)) if known else "none at all"
        raise InvalidInput(f"the model has no LoRA adapter {adapter!r} (it has {there})")
    for name, layer in carrying.items():
        _refuse_variants(name, layer, adapter)
    return carrying


def _refuse_variants(name: str, layer: Any, adapter: str) -> None:
    what = ""
    if getattr(layer, "use_dora", {}).get(adapter):
        what = "is DoRA, whose magnitudes are no part of a plain product"
    elif getattr(layer, "lora_variant", {}).get(adapter) is not None:
        what = f"is a {type(layer.lora_variant[adapter]).__name__}"
    elif getattr(layer, "lora_bias", {}).get(adapter):
        what = "has a LoRA bias"
    elif type(layer).__name__ == "ParamWrapper":
        what = "adapts a bare parameter (target_parameters)"
    if what:
        raise UnsupportedTensor(f"LoRA layer {name!r} {what}: neither engines nor the merge take it")


def _refuse_unfoldable(name: str, layer: Any) -> None:
    weight = layer.base_layer.weight
    if layer.merged_adapters:
        raise InvalidInput(f"LoRA layer {name!r} is merged already ({layer.merged_adapters}): unmerge_adapter() first")
    if weight.dim() != 2 or not weight.dtype.is_floating_point:
        raise UnsupportedTensor(
            f"LoRA layer {name!r}: an adapter can be folded into a two-dimensional float weight, not into "
            f"{weight.dtype} {list(weight.shape)}"
        )


def _refuse_more(name: str, adapter: str) -> None:
    """Things of the adapter that a PEFT directory for engines cannot carry."""
    if (saved := _SAVED.fullmatch(name)) is not None and saved[2] == adapter:
        raise UnsupportedTensor(f"{name!r} is trained in full (modules_to_save), which engines do not load: {_REMEDY}")
    if (other := _OTHER.fullmatch(name)) is not None or "trainable_tokens" in name:
        raise UnsupportedTensor(f"{name!r} is a {other[2] if other else 'trained token'}: engines do not load it")


def _merged_names(state: Mapping[str, torch.Tensor], adapter: str) -> Iterator[tuple[str, str]]:
    """(name in the base model, name in `state`) of what a merged version holds, in order."""
    saved = {found[1] for name in state if (found := _SAVED.fullmatch(name)) and found[2] == adapter}
    for name in state:
        if "trainable_tokens" in name:
            raise UnsupportedTensor(f"{name!r} is a trained token, which the merge does not fold in")
        if _LORA.fullmatch(name):
            continue
        if (found := _SAVED.fullmatch(name)) is not None:
            if found[2] == adapter:
                yield _base_name(f"{found[1]}.{found[3]}"), name
        elif (found := _ORIGINAL.fullmatch(name)) is not None:
            if found[1] not in saved:
                yield _base_name(f"{found[1]}.{found[2]}"), name
        else:
            yield _base_name(name), name


def _base_name(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


# -- adapter_config.json -------------------------------------------------------------------------------------


def _config(model: nn.Module, layers: Mapping[str, Any], adapter: str) -> bytes:
    peft: Any = next((part.peft_config for part in model.modules() if hasattr(part, "peft_config")), {})
    own = peft.get(adapter)
    rank = _same(layers, {name: int(layer.r[adapter]) for name, layer in layers.items()}, "rank")
    scaling = _same(layers, {name: _scaling(layer, adapter) for name, layer in layers.items()}, "scaling")
    _refuse_base_changing(own)
    alpha = scaling * rank
    fields = {
        "peft_type": "LORA",
        "task_type": getattr(getattr(own, "task_type", None), "value", getattr(own, "task_type", None)),
        "base_model_name_or_path": getattr(own, "base_model_name_or_path", None),
        "inference_mode": True,
        "r": rank,
        # SGLang computes alpha / r whatever else is said, so rank-stabilised scaling is written as a plain one.
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "target_modules": _targets(model, layers),
        "fan_in_fan_out": any(getattr(layer, "fan_in_fan_out", False) for layer in layers.values()),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
    }
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def _same(layers: Mapping[str, Any], values: Mapping[str, Any], what: str) -> Any:
    first = next(iter(layers))
    for name, value in values.items():
        if value != values[first]:
            raise UnsupportedTensor(
                f"LoRA {what} of {name!r} is {value}, of {first!r} {values[first]}: SGLang knows one for all; {_REMEDY}"
            )
    return values[first]


def _refuse_base_changing(own: Any) -> None:
    if getattr(own, "bias", "none") != "none":
        raise UnsupportedTensor(f"the adapter trains biases (bias={own.bias!r}), which engines do not load")
    init = getattr(own, "init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in ("gaussian", "eva", "orthogonal"):
        raise UnsupportedTensor(f"init_lora_weights={init!r} changes the base model's weights: {_REMEDY}")


def _targets(model: nn.Module, layers: Mapping[str, Any]) -> list[str]:
    """The last part of the adapted modules' names, or the whole names where others have the same last part."""
    suffixes = {name.rpartition(".")[2] for name in layers}
    for name, _ in model.named_modules():
        clean = clean_name(name) if name else ""
        inside = any(clean.startswith(f"{layer}.") for layer in layers)
        if clean.rpartition(".")[2] in suffixes and clean not in layers and not inside:
            return sorted(layer.removeprefix(PREFIX) for layer in layers)
    return sorted(suffixes)


# -- for the publisher ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the publisher walks instead of the models it was given, and what lies beside them."""

    models: Mapping[str, Any]
    owners: Mapping[str, Any]
    """By track: whose `config` describes it."""

    adapter: AdapterExport | None = None
    """Set for an adapter version: one file, and no other assets than the adapter's config."""


def prepare(
    models: Mapping[str, Any], *, kind: str, adapter: str, merge_lora: bool, dtype: torch.dtype | None
) -> Prepared:
    """The sources of a version of this kind. InvalidInput for what does not go together."""
    if kind not in ("full", "adapter"):
        raise InvalidInput(f"kind={kind!r}: publish 'full' or 'adapter'")
    if kind == "full":
        if not merge_lora:
            return Prepared(models=models, owners=models)
        sources = {track: MergedSource(_module(model), adapter, dtype) for track, model in models.items()}
        return Prepared(models=sources, owners={track: base_of(model) for track, model in models.items()})
    if merge_lora:
        raise InvalidInput("merge_lora=True folds the adapter into a full version: use kind='full'")
    if list(models) != [MAIN_TRACK]:
        raise InvalidInput(f"an adapter version is one model's, not that of tracks {', '.join(models)}")
    export = export_adapter(_module(models[MAIN_TRACK]), adapter)
    return Prepared(models={MAIN_TRACK: export.tensors}, owners={}, adapter=export)


def _module(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"a LoRA adapter is taken from a module, not from a {type(model).__name__}")
    return model
