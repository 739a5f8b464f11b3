"""`model.safetensors.index.json`: which file each tensor is in.

Written for every version, also for one shard: it is SGLang's only completeness check. With an index a missing
shard is refused; without one SGLang loads what is there and answers 200.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from ..errors import BadShard, InvalidName
from ..manifest import check_basename
from .json_object import parse_object
from .plan import ShardPlan

INDEX_NAME = "model.safetensors.index.json"

MAX_INDEX = 128 << 20
"""A larger index is refused before it is read (200,000 tensors of an MoE need about 20 MiB)."""


def index_bytes(plans: Iterable[ShardPlan]) -> bytes:
    """The index of these shards, as transformers writes it: sorted names, total size of the tensors in bytes.

    Ties that are stored once (policy `omit`) are in no plan and not in the index either, as in
    transformers' own.
    """
    plans = list(plans)
    weight_map = {spec.name: plan.file for plan in plans for spec in plan.tensors}
    index = {
        "metadata": {"total_size": sum(plan.nbytes for plan in plans)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2).encode() + b"\n"


def read_index(data: bytes) -> dict[str, str]:
    """Tensor name -> file name, from untrusted bytes. BadShard unless every file is a plain basename.

    Checked before any open: with `../x` or `/etc/x` in a weight map other readers opened any file.
    """
    if len(data) > MAX_INDEX:
        raise BadShard(f"{INDEX_NAME} has {len(data)} bytes, more than {MAX_INDEX}")
    try:
        weight_map = msgspec.convert(parse_object(data).get("weight_map"), dict[str, str])
        for file in set(weight_map.values()):
            check_basename(file)
    except (msgspec.ValidationError, InvalidName, BadShard) as error:
        raise BadShard(f"{INDEX_NAME}: {error}") from error
    return weight_map
