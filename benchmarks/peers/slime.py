"""Deltas as slime, miles and SkyRL write them, after their published layout: no code of theirs.

    weight_v000002/model-00001-of-00001.safetensors    the tensors' own names; U8 = zstd-1(new XOR old);
                                                       __metadata__: xxh3-128 of each tensor's new state
    weight_v000002/model.safetensors.index.json        version, base_version, encoding; written last

The reader XORs into its local checkpoint in place, through a mapping, and checks the new state after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file

FILE = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK = 2 << 20
Arrays = Mapping[str, np.ndarray]


def publish(old: Arrays, new: Arrays, folder: str) -> None:
    """`old` becomes `new`: the trainer's copy of what its readers hold."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(new, pool.map(lambda name: _encode(old[name], new[name]), new), strict=True))
    payload = {name: np.frombuffer(blob, np.uint8) for name, (blob, _) in found.items()}
    path = f"{folder}/{FILE}"
    save_file(payload, f"{path}.tmp", metadata={name: checksum for name, (_, checksum) in found.items()})
    _settle(path)
    facts = {"version": "2", "base_version": "1", "delta_encoding": "xor", "compression_format": "zstd",
             "checksum_format": "xxh3-128"}  # fmt: skip
    with open(f"{folder}/{INDEX}.tmp", "w") as file:
        json.dump({"metadata": facts, "weight_map": dict.fromkeys(new, FILE)}, file)
    _settle(f"{folder}/{INDEX}")


def _encode(old: np.ndarray, new: np.ndarray) -> tuple[bytes, str]:
    changed = np.bitwise_xor(old, new)
    np.copyto(old, new)
    return zstandard.ZstdCompressor(level=1).compress(changed.data), xxhash.xxh3_128_hexdigest(new.data)


def _settle(path: str) -> None:
    fd = os.open(f"{path}.tmp", os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    os.replace(f"{path}.tmp", path)


def apply(local: str, folder: str) -> None:
    """Change the safetensors file `local` in place. ValueError if a tensor is not what it should be then."""
    with safe_open(f"{folder}/{FILE}", "np") as delta, ThreadPoolExecutor(os.cpu_count()) as pool:
        checksums, image = delta.metadata(), np.memmap(local, np.uint8, "r+")
        places = places_of(local)
        jobs = [(image[slice(*places[name])], delta.get_tensor(name), checksums[name]) for name in checksums]
        list(pool.map(lambda job: _xor(*job), jobs))


def places_of(path: str) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes are in a safetensors file."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    begin = 8 + size
    return {name: (begin + entry["data_offsets"][0], begin + entry["data_offsets"][1])
            for name, entry in header.items() if name != "__metadata__"}  # fmt: skip


def _xor(image: np.ndarray, blob: np.ndarray, checksum: str) -> None:
    changed = np.frombuffer(zstandard.ZstdDecompressor().decompress(blob.data), np.uint8)
    for at in range(0, len(image), CHUNK):
        image[at : at + CHUNK] ^= changed[at : at + CHUNK]
    if xxhash.xxh3_128_hexdigest(image.data) != checksum:
        raise ValueError("a tensor is not what its checksum says, and has been changed in place by now")


def arrays(state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Byte views of tensors."""
    return {name: tensor.view(-1).view(torch.uint8).numpy() for name, tensor in state.items()}
