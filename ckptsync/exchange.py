"""One exchange of Python values between ranks over gloo: a single round of messages where they are small.

torch's object collectives take two rounds each, and a consensus before them a third; in a background publish the
training waits for all of that. Here the flag, the length and the first KiB of everybody's value travel together.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

Status = tuple[str, str] | None
"""Nothing, or the type's name and the words of an error."""

_HEAD = struct.Struct("<?q")
_ROUND = 1024


def converse(
    group: dist.ProcessGroup, status: Status, value: Any, *, from_zero: bool, agree_only: bool
) -> tuple[list[Status] | None, list[Any]]:
    """Collective. Every rank's failure, by rank, if any has one; else None and the values: everybody's, rank 0's
    alone with `from_zero`, none with `agree_only`."""
    sends = status is not None or not (agree_only or (from_zero and group.rank()))
    data = pickle.dumps(value if status is None else status) if sends else b""
    heads = _gather(group, _HEAD.pack(status is not None, len(data)) + data[: _ROUND - _HEAD.size], _ROUND)
    failed, sizes = zip(*(_HEAD.unpack_from(head) for head in heads), strict=True)
    if not any(failed) and agree_only:
        return None, []
    ranks = [rank for rank, bad in enumerate(failed) if bad] or ([0] if from_zero else list(range(len(heads))))
    values = _whole(group, data, heads, {rank: sizes[rank] for rank in ranks})
    if any(failed):
        return [values.get(rank) for rank in range(len(heads))], []
    return None, list(values.values())


def _whole(group: dist.ProcessGroup, data: bytes, heads: Sequence[bytes], sizes: dict[int, int]) -> dict[int, Any]:
    """The values of the ranks in `sizes`, with a second round only if one of them did not fit into the first."""
    if (longest := max(sizes.values())) > _ROUND - _HEAD.size:
        if list(sizes) == [0]:
            return {0: pickle.loads(_from_zero(group, data, longest))}  # noqa: S301 - from a rank of this job
        heads = [bytes(_HEAD.size) + whole for whole in _gather(group, data[:longest], longest)]
    return {rank: pickle.loads(heads[rank][_HEAD.size :]) for rank in sizes}  # noqa: S301 - trailing zeros are ignored


def _gather(group: dist.ProcessGroup, data: bytes, size: int) -> list[bytes]:
    import torch
    import torch.distributed as dist

    found = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(group.size())]
    dist.all_gather(found, _tensor(data, size), group=group)
    return [tensor.numpy().tobytes() for tensor in found]


def _from_zero(group: dist.ProcessGroup, data: bytes, size: int) -> bytes:
    import torch.distributed as dist

    tensor = _tensor(data, size)
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor.numpy().tobytes()


def _tensor(data: bytes, size: int) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
