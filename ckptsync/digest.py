"""Digests by name. xxh3-128 by default; blake3 where manifests are signed.

xxh3-128 runs at memory speed (9.9 GB per cpu-second here, against 1.5 for blake3 and 1.2 for sha256), so
digesting while writing is free next to storage. It detects accidents, not attackers: a signed channel uses blake3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import blake3
import xxhash

from .errors import UnsupportedFormat

DEFAULT = "xxh3-128"

Bytes = bytes | bytearray | memoryview


class Hasher(Protocol):
    def update(self, data: Bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


_ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "xxh3-128": xxhash.xxh3_128,
    "blake3": blake3.blake3,
}


def hasher(algorithm: str = DEFAULT) -> Hasher:
    """A fresh streaming hasher. Raises UnsupportedFormat for a name that this release does not know."""
    try:
        return _ALGORITHMS[algorithm]()
    except KeyError:
        known = ", ".join(sorted(_ALGORITHMS))
        raise UnsupportedFormat(f"digest algorithm {algorithm!r} is not known here (known: {known})") from None


def digest(data: Bytes, algorithm: str = DEFAULT) -> str:
    """Hex digest of one buffer."""
    state = hasher(algorithm)
    state.update(data)
    return state.hexdigest()


def sha256(data: Bytes) -> str:
    """Hex sha256, used for the manifest itself and for schemas: small, and comparable everywhere."""
    return hashlib.sha256(data).hexdigest()
