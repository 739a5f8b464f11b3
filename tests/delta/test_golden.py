"""The encoding stays what it is: blobs of every mode that were written once decode to what they did, in a decoder
written from docs/delta-format.md alone too."""

from __future__ import annotations

import os
import struct

import pytest
import xxhash
import zstandard

from ckptsync.delta import codec

DATA = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "delta")
MODES = ("raw", "planes", "sparse", "sparse-ulp", "class-ulp", "dense-ulp", "mask-ulp")


def golden(name: str) -> tuple[bytes, bytes, bytes]:
    """(blob, old, new)"""
    return read(f"{name}.blob"), read(f"{name}.old"), read(f"{name}.new")


def read(file: str) -> bytes:
    with open(os.path.join(DATA, file), "rb") as handle:
        return handle.read()


@pytest.mark.parametrize("name", MODES)
def test_golden_blobs_decode_to_what_they_did(name: str) -> None:
    blob, old, new = golden(name)
    image = bytearray(old)
    codec.apply(codec.parse(blob, 2, len(old) // 2), image)
    assert image == new


@pytest.mark.parametrize("name", MODES)
def test_a_decoder_written_from_the_page_agrees(name: str) -> None:
    blob, old, new = golden(name)
    assert decode(blob, old) == new


# -- the page, read literally: slow, and nothing of ours in it -------------------------------------------------


def decode(blob: bytes, old: bytes) -> bytes:
    magic, size, x, _, blocks, n, _, length, digest = struct.unpack("<8sBBHIQQQ16xQ", blob[:64])
    assert (magic, length, n * size) == (b"CKPTSYN1", len(blob), len(old))
    assert xxhash.xxh3_64_intdigest(blob[:56] + blob[64 : 64 + 48 * blocks]) == digest
    out = b""
    for index in range(blocks):
        row = struct.unpack_from("<B3xIQI4xQQQ", blob, 64 + 48 * index)
        part = old[index * size << x : (index + 1) * size << x]
        out += block(row, blob[row[2] : row[2] + row[3]], part, size)
    return out


def block(row, payload: bytes, old: bytes, size: int) -> bytes:
    mode, changed, _, length, digest, base, new_digest = row
    assert xxhash.xxh3_64_intdigest(old) == base
    assert xxhash.xxh3_64_intdigest(payload) == digest
    top = 1 << 8 * size
    values = [int.from_bytes(old[at : at + size], "little") for at in range(0, len(old), size)]
    if length:
        values = MODE[mode](sections(payload, mode, size), values, size, top, changed)
    new = b"".join((value % top).to_bytes(size, "little") for value in values)
    assert xxhash.xxh3_64_intdigest(new) == new_digest
    return new


def sections(payload: bytes, mode: int, size: int):
    classes = int.from_bytes(payload[4:8], "little") // 16
    count = [1, size, 3 + size, 7, 1 + 6 * classes, size, 5][mode]
    at = 8 * count
    for index in range(count):
        stored, raw = struct.unpack_from("<II", payload, 8 * index)
        part = payload[at : at + stored]
        yield part if stored == raw else zstandard.ZstdDecompressor().decompress(part)
        at += -(-stored // 8) * 8


def planes(parts, count: int, size: int) -> list[int]:
    found = [next(parts) for _ in range(size)]
    return [sum(found[byte][at] << 8 * byte for byte in range(size)) for at in range(count)]


def classes_of(parts) -> list[tuple[int, int, int]]:
    table = next(parts)
    return [struct.unpack_from("<IIB", table, at) for at in range(0, len(table), 16)]


def ranks(parts, split: int) -> list[int]:
    low, digits, gaps, number = next(parts), next(parts), [], 0
    for digit in digits:
        number += digit
        if digit != 255:
            gaps.append(number << 8 | low[len(gaps)] if split else number)
            number = 0
    found, at = [], -1
    for gap in gaps:
        at += gap + 1
        found.append(at)
    return found


def differences(parts, count: int, size: int) -> list[int]:
    signs, quads, small, large = (next(parts) for _ in range(4))
    small, large = iter(small), iter([large[at : at + size] for at in range(0, len(large), size)])
    found = []
    for at in range(count):
        value = (quads[at // 4] >> 2 * (at % 4) & 3) + 1
        if value == 4:
            value = next(small) + 4
            if value == 259:
                value = int.from_bytes(next(large), "little")
        found.append(-value if signs[at // 8] >> at % 8 & 1 else value)
    return found


def sparse(parts, values, size, top, changed):
    ((_, _, split),) = classes_of(parts)
    places = ranks(parts, split)
    for place, value in zip(places, planes(parts, changed, size), strict=True):
        values[place] = value
    return values


def by_class(parts, values, size, top, changed):
    table = classes_of(parts)
    limits = [limit for limit, _, _ in table[:-1]]
    members = [[] for _ in table]
    for at, value in enumerate(values):
        members[sum(value % (top // 2) >= limit for limit in limits)].append(at)
    todo = []
    for own, (_, count, split) in zip(members, table, strict=True):
        places = ranks(parts, split)
        todo += zip([own[rank] for rank in places], differences(parts, count, size), strict=True)
    for place, difference in todo:
        values[place] += difference
    return values


def dense(parts, values, size, top, changed):
    coded = planes(parts, len(values), size)
    return [
        value + (code // 2 if code % 2 == 0 else -(code // 2) - 1) for value, code in zip(values, coded, strict=True)
    ]


def masked(parts, values, size, top, changed):
    mask = next(parts)
    places = [at for at in range(len(values)) if mask[at // 8] >> at % 8 & 1]
    for place, difference in zip(places, differences(parts, changed, size), strict=True):
        values[place] += difference
    return values


MODE = [
    lambda parts, values, size, top, changed: [
        int.from_bytes(raw, "little") for raw in struct.unpack(f"{size}s" * len(values), next(parts))
    ],
    lambda parts, values, size, top, changed: planes(parts, len(values), size),
    sparse,
    by_class,
    by_class,
    dense,
    masked,
]
