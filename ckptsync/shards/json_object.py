"""JSON objects from untrusted bytes: shard headers and indexes."""

from __future__ import annotations

import json
from typing import Any

from ..errors import BadShard


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """One JSON object in UTF-8, no key given twice at any depth; else BadShard.

    The standard parser, since msgspec keeps the last of two equal keys without a word, and two parsers that
    keep different ones load different weights from one file.
    """
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # json's, UTF-8's, and integers of thousands of digits
        raise BadShard(f"not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadShard("not a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise BadShard(f"the key {twice!r} is given twice")
    return found
