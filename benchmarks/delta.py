"""Every known encoding of a weight update, side by side on the same updates: bytes, and speed of one core.

    python -m benchmarks.delta [synthetic] [real] [--elements 16777216] [--rounds 5] [--steps 6] [--json]

- synthetic: Gaussian bf16 weights (sigma 0.02) and an Adam-like step whose size is tuned to a density of 0.1, 1, 5 and
  20 % of changed elements.
- real: SmolLM2-135M from fp32 masters, AdamW, next-token training on its own tokenizer's text at lr 1e-6 and 1e-5,
  published as bf16; the update of the last step. Its weights come from a 4-bit file, so they are peculiar.

Speeds are GB of the full bf16 size per CPU second of one thread, best of the rounds, beside memcpy and xxh3-128 in the
same run. `decode` of ours proves both digests of every block; `apply` leaves the proof to the reader's digests.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import xxhash
import zstandard
from rich.console import Console
from rich.table import Table

from benchmarks.common import load
from ckptsync.delta import codec
from tests.delta.updates import adam_like

DENSITIES = (0.001, 0.01, 0.05, 0.2)
BLOCK = 1 << 22

Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Result:
    """One encoding of one update."""

    update: str
    density: float
    encoding: str
    ratio: float
    bytes_per_change: float
    encode_gb_s: float
    decode_gb_s: float | None = None
    apply_gb_s: float | None = None


def synthetic(count: int, density: float) -> Arrays:
    return adam_like(count, density, sample=1 << 20, halvings=40)


def real(rate: float, steps: int) -> Arrays:
    """The bf16 weights of SmolLM2 before and after the last of `steps` steps, as one array."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ckptsync.demo.smollm2 import smollm2

    folder = smollm2()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = " ".join([__doc__ or "", codec.__doc__ or "", json.__doc__ or "", argparse.__doc__ or ""])
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for number in range(steps):
        before = published(model) if number == steps - 1 else None
        start = torch.randint(0, len(tokens) - 128, (2,))
        batch = torch.stack([tokens[at : at + 128] for at in start])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    del optimizer  # twice the model's size
    return before, published(model)


def published(model) -> np.ndarray:
    import torch

    parts = [p.detach().to(torch.bfloat16).view(torch.int16).flatten() for p in model.parameters()]
    return torch.cat(parts).numpy().view(np.uint16)


# -- encodings -------------------------------------------------------------------------------------------------


def pack(*parts: np.ndarray) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1)
    return b"".join(compressor.compress(np.ascontiguousarray(part).data.cast("B")) for part in parts)


def planes(values: np.ndarray) -> list[np.ndarray]:
    return [values.view(np.uint8)[0::2], values.view(np.uint8)[1::2]]


def blocks(old: np.ndarray, new: np.ndarray) -> Iterator[Arrays]:
    for at in range(0, len(old), BLOCK):
        yield old[at : at + BLOCK], new[at : at + BLOCK]


def int32_value(old: np.ndarray, new: np.ndarray) -> bytes:
    places = np.flatnonzero(old != new).astype(np.int32)
    return places.tobytes() + new[places].tobytes()


def gap_xor(old: np.ndarray, new: np.ndarray) -> bytes:
    places = np.flatnonzero(old != new)
    gaps = np.minimum(np.diff(places, prepend=-1), 65535).astype(np.uint16)  # none is larger at these densities
    return pack(gaps, (old ^ new)[places])


def row_column(old: np.ndarray, new: np.ndarray, width: int = 1024) -> bytes:
    places = np.flatnonzero(old != new)
    rows, columns = np.divmod(places, width)
    steps = np.diff(rows, prepend=0)
    columns = np.where(steps, columns, np.diff(columns, prepend=0))
    return pack(
        np.concatenate([steps.astype(np.uint8), columns.astype(np.uint16).view(np.uint8), new[places].view(np.uint8)])
    )


def mask_value(old: np.ndarray, new: np.ndarray) -> bytes:
    hit = old != new
    return pack(np.packbits(hit), *planes(new[hit]))


ENCODINGS: dict[str, Callable[[np.ndarray, np.ndarray], bytes]] = {
    "full, zstd-1": lambda _, new: pack(new),
    "full, byte planes, zstd-1": lambda _, new: pack(*planes(new)),
    "int32 index + value (TRL, verl, AstraFlow)": int32_value,
    "row/column + value, zstd-1 (grail)": row_column,
    "bitmask + value planes, zstd-1": mask_value,
    "XOR, zstd-1 (slime, miles, SkyRL, stitch)": lambda old, new: pack(old ^ new),
    "XOR byte planes, zstd-1": lambda old, new: pack(*planes(old ^ new)),
    "u16 gap + XOR, zstd-1 (NeMo-RL)": gap_xor,
}


def others(name: str, old: np.ndarray, new: np.ndarray, rounds: int) -> list[Result]:
    return [other(name, encoding, old, new, rounds) for encoding in ENCODINGS]


def other(name: str, encoding: str, old: np.ndarray, new: np.ndarray, rounds: int) -> Result:
    parts: list[bytes] = []

    def encode() -> None:
        parts[:] = [ENCODINGS[encoding](*pair) for pair in blocks(old, new)]

    seconds, decode = fastest(encode, rounds), None
    if encoding.startswith("XOR, "):
        image = old.copy()
        decode = old.nbytes / 1e9 / fastest(lambda: undo_xor(parts, image), rounds)
    return result(name, encoding, old, new, sum(map(len, parts)), seconds, decode)


def undo_xor(parts: list[bytes], image: np.ndarray) -> None:
    for part, at in zip(parts, range(0, len(image), BLOCK), strict=True):
        image[at : at + BLOCK] ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(part), dtype=np.uint16)


def ours(name: str, old: np.ndarray, new: np.ndarray, effort: codec.Effort, rounds: int) -> Result:
    before, after = old.data.cast("B"), new.data.cast("B")
    found: list[bytes | None] = [None]
    seconds = fastest(lambda: found.__setitem__(0, codec.encode(before, after, 2, effort=effort)), rounds)
    blob = codec.parse(found[0] or b"", 2, len(old))
    image = old.copy()
    codec.apply(blob, image.data.cast("B"))
    assert np.array_equal(image, new)
    speeds = []
    for prove in (True, False):
        best = float("inf")
        for _ in range(rounds):
            image[:] = old
            start = time.process_time()
            codec.apply(blob, image.data.cast("B"), prove=prove)
            best = min(best, time.process_time() - start)
        speeds.append(old.nbytes / 1e9 / best)
    return result(name, f"ckptsync-1, {effort}", old, new, len(found[0] or b""), seconds, *speeds)


def result(name: str, encoding: str, old: np.ndarray, new: np.ndarray, size: int, seconds: float, *speeds) -> Result:
    changed = np.count_nonzero(old != new)
    rounded = [None if speed is None else round(speed, 2) for speed in speeds]
    return Result(name, round(changed / len(old), 5), encoding, round(old.nbytes / size, 1),
                  round(size / changed, 3), round(old.nbytes / 1e9 / seconds, 2), *rounded)  # fmt: skip


def fastest(work: Callable[[], object], rounds: int) -> float:
    """CPU seconds of the fastest round: others share the machine."""
    work()
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def yardsticks(data: np.ndarray, rounds: int) -> dict[str, float]:
    other = np.empty_like(data)
    gb = data.nbytes / 1e9
    return {
        "memcpy": round(gb / fastest(lambda: np.copyto(other, data), rounds), 2),
        "xxh3-128": round(gb / fastest(lambda: xxhash.xxh3_128_digest(data), rounds), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("updates", nargs="*", choices=("synthetic", "real"), default="synthetic",
                        help="real: train SmolLM2 for a few steps (about 3 GB of memory)")  # fmt: skip
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of which the last one's update is encoded")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    updates: dict[str, Callable[[], Arrays]] = {}
    if "synthetic" in given.updates:
        updates |= {f"synthetic, {d:.1%}": functools.partial(synthetic, given.elements, d) for d in DENSITIES}
    if "real" in given.updates:
        updates |= {f"SmolLM2, lr {rate:g}": functools.partial(real, rate, given.steps) for rate in (1e-6, 1e-5)}
    results: list[Result] = []
    speeds: dict[str, float] = {}
    for name, make in updates.items():
        old, new = make()
        speeds = speeds or yardsticks(old, given.rounds)
        results += others(name, old, new, given.rounds)
        results += [ours(name, old, new, effort, given.rounds) for effort in ("fast", "best")]
    if given.json:
        print(json.dumps({"yardsticks": speeds, "rows": [asdict(row) for row in results], "load": load()}))
        return
    show(results, speeds)


def show(results: list[Result], speeds: dict[str, float]) -> None:
    table = Table(title="Bytes and speed of weight updates in bf16; GB/s of full size, one core")
    for column in ("update", "changed", "encoding", "ratio", "B/change", "encode", "decode", "apply"):
        table.add_column(column, justify="left" if column in {"update", "encoding"} else "right")
    last = ""
    for row in results:
        if row.update != last:
            table.add_section()
        speeds_of = [row.encode_gb_s, row.decode_gb_s, row.apply_gb_s]
        cells = ["" if speed is None else f"{speed:.2f}" for speed in speeds_of]
        name, last = row.update if row.update != last else "", row.update
        table.add_row(
            name, f"{row.density:.3%}", row.encoding, f"{row.ratio:.1f}", f"{row.bytes_per_change:.2f}", *cells
        )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(f"memcpy {speeds['memcpy']} GB/s, xxh3-128 {speeds['xxh3-128']} GB/s; {load()}")


if __name__ == "__main__":
    main()
