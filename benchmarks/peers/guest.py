"""Runs in the environment of tests/envs/peers.txt: loaders and codecs that pin what ckptsync does not.

One JSON line in, one out: {"what": NAME, ...} -> what clock.take found, or {"cannot": why}. It measures itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.peers import lines
from benchmarks.peers.clock import take


def fastsafetensors(paths: list[str]) -> None:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: paths})
    buffers = loader.copy_files_to_device()
    touch([buffers.get_tensor(name) for name in loader.get_keys()])
    buffers.close()
    loader.close()


def runai(paths: list[str]) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        # What it yields is its buffer's, for as long as the next one has not come: kept as a loader keeps it.
        kept = [tensor.clone() for _, tensor in streamer.get_tensors()]
    touch(kept)


def touch(tensors: list[torch.Tensor]) -> None:
    """Every page, since some loaders only map."""
    for tensor in tensors:
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()


def fireworks_encode(old: str, new: str, out: str, format_: str) -> None:
    from fireworks_delta_compression import compression

    compression.delta_compress_dicts_to_file(
        src=load_file(old), dst=load_file(new), diff_file=out, compression_format=format_
    )


def fireworks_apply(old: str, diff: str, format_: str) -> None:
    from fireworks_delta_compression import compression

    found = compression.delta_decompress_dict_from_file(
        src=load_file(old), diff_file=diff, compression_format=format_,
        executor=compression.get_delta_decompress_executor(),
    )  # fmt: skip
    touch(list(found.values()))


def checkpoint_engine() -> None:
    from checkpoint_engine.ps import ParameterServer

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    ParameterServer()


WORKS: dict[str, Callable[..., None]] = {
    work.__name__: work for work in (fastsafetensors, runai, fireworks_encode, fireworks_apply, checkpoint_engine)
}


def counted(work: Callable[..., None], **arguments: Any) -> dict[str, Any]:
    return asdict(take(lambda: work(**arguments)))


def main() -> None:
    lines.serve({name: partial(counted, work) for name, work in WORKS.items()}, lines.answers())


if __name__ == "__main__":
    main()
