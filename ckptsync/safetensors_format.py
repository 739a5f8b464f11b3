"""Facts of the safetensors file format, shared by writer, reader and manifest. Imports nothing of ours.

A file is: 8 bytes little-endian header length, the header (JSON, may be padded with spaces), the tensors' bytes
back to back without a gap. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of every dtype of safetensors 0.8. Shapes of F4 and F6 count elements, not bytes."""

MAX_HEADER = 100_000_000
"""The limit of the reference reader: a longer header is refused by every engine, so shards are cut before it."""
