"""What ranks send each other: boxes of any sharding come together as the tensor that they are parts of."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.delta.baseline import Baseline
from ckptsync.delta.messages import Messages
from ckptsync.export.pieces import Box
from ckptsync.manifest import Parent
from ckptsync.testing.strategies import Block, shardings

NAME, KEY = "layers.0.weight", ("model", "layers.0.weight")
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]


Publishes = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4)
"""Of each: whether it is committed, and whether its boxes lie on a GPU; a background publish has them on the host."""


@given(shardings(), st.sampled_from(DTYPES), Publishes, st.booleans(), st.integers(0, 2**31))
def test_boxes_come_together_whatever_their_shape_wherever_they_lie_and_whichever_commits_fail(
    cut: tuple[tuple[int, ...], list[Block]],
    dtype: torch.dtype,
    publishes: list[tuple[bool, bool]],
    on_gpu: bool,
    seed: int,
) -> None:
    shape, blocks = cut
    parts = [Box(block.offset, block.shape, (rank,)) for rank, block in enumerate(blocks, start=1)]
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    current = torch.from_numpy(rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    senders, owner = [Messages(on_gpu=on_gpu) for _ in parts], Messages()
    baseline = None
    for committed, far in [(True, True), *publishes]:
        for messages in (*senders, owner):
            messages.begin(baseline, {NAME: KEY})
        made = torch.empty(shape, dtype=dtype)
        for messages, box in zip(senders, parts, strict=True):
            local = part(current, box).contiguous()
            with patch("ckptsync.delta.messages.is_far", lambda _, far=far: far):
                messages.compare([(NAME, box, local)])
            changed, message = messages.outgoing(NAME, box, local)
            assert len(message) <= local.nbytes
            found = owner.incoming(NAME, box, made, message) if changed else message.view(dtype).view(box.shape)
            bits(part(made, box)).copy_(bits(found))
        assert torch.equal(bits(made), bits(current))
        if committed:
            baseline = baseline or Baseline(Parent(epoch=1, number=1, content_digest=""))
            baseline.keep(KEY, bits(current).contiguous().view(torch.uint8).numpy().data.cast("B"))
            for messages in (*senders, owner):
                messages.commit()
        hit = torch.from_numpy(rng.random(shape) < 0.05)
        bits(current).add_(hit.to(bits(current).dtype))
