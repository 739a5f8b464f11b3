"""Names as an engine knows them: what wrappers put in front is taken off, by a documented list."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..errors import DuplicateName, InvalidInput
from ..wording import shortened

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts that torch.compile, FSDP and activation checkpointing add, anywhere in a name."""

LEADING_WRAPPERS = WRAPPERS | {"module"}
"""Parts taken off the front of a name as well: `module` is DistributedDataParallel's, but further in it may
be the model's own."""

_PEFT = re.compile(r"\.base_layer\.|\.lora_(?:embedding_)?[AB](?:\.|$)")
"""What PEFT puts in the place of a layer: the layer itself, and the two factors."""

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Names:
    """Clean names by original name, in order, and the wrapper parts that were taken off."""

    clean: Mapping[str, str]
    removed: tuple[str, ...]


def clean_name(name: str) -> str:
    """`module._orig_mod.layers.0.weight` -> `layers.0.weight`."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in LEADING_WRAPPERS:
        del parts[0]
    return ".".join(part for part in parts if part not in WRAPPERS)


def clean_names(names: Iterable[str]) -> Names:
    """Raises DuplicateName, with both originals, if two names become one."""
    clean: dict[str, str] = {}
    owner: dict[str, str] = {}
    removed: set[str] = set()
    for name in names:
        short = clean_name(name)
        if short in owner:
            raise DuplicateName(f"{owner[short]!r} and {name!r} are both {short!r} once wrapper names are taken off")
        owner[short] = name
        clean[name] = short
        if short != name:
            removed |= LEADING_WRAPPERS.intersection(name.split(".")) - set(short.split("."))
    return Names(clean, tuple(sorted(removed)))


def refuse_peft(name: str, final: str) -> None:
    """InvalidInput if `name` is of a PEFT layer and is still in the version, as `final`.

    from_pretrained finds none of its names in such a version and fills the model with random values. Rules may
    take these parts out, or put them in where an engine has them (vLLM with LoRA: `q_proj.base_layer.weight`).
    """
    if _PEFT.search(final) and _PEFT.search(name):
        raise InvalidInput(
            f"{shortened(final)!r} is a part of a LoRA layer, which no full model has: publish the PEFT model with "
            "kind='adapter', or folded in with merge_lora=True"
        )


def layer_order(names: Iterable[str], key: Callable[[str], str] = str) -> list[str]:
    """The names in the order of their layers, for dicts that were sorted as text (`layers.10` before
    `layers.2`). `key` gives the name to order by.

    Stacks of layers stay where they first appear, and the order inside a layer is kept.
    """
    stacks: dict[str, int] = {}
    keys: dict[str, tuple[int, int]] = {}
    for name in names:
        clean = key(name)
        found = _LAYER.search(clean)
        stack = clean[: found.start()] + "." if found else clean
        keys[name] = (stacks.setdefault(stack, len(stacks)), int(found[1]) if found else 0)
    return sorted(keys, key=keys.__getitem__)
