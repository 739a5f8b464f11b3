"""Is every tensor that the engine expects in the version, and no other?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ..errors import InvalidInput
from ..shards.hf_folder import scan_checkpoint
from ..shards.index import INDEX_NAME, MAX_INDEX, read_index

Expected = str | Iterable[str]


def expected_names(expect: Expected) -> frozenset[str]:
    """Names from a Hugging Face folder, from an index file, or as given.

    A folder with an index need not hold the shards; one without is read from its safetensors headers.
    InvalidInput, NotFound or BadShard if there is nothing to learn the names from.
    """
    if not isinstance(expect, str):
        return frozenset(expect)
    index = os.path.join(expect, INDEX_NAME) if os.path.isdir(expect) else expect
    if not os.path.exists(index):
        return frozenset(scan_checkpoint(expect).tensors)
    try:
        with open(index, "rb") as file:
            return frozenset(read_index(file.read(MAX_INDEX + 1)))
    except OSError as error:
        raise InvalidInput(f"expect={expect!r}: {error.strerror}") from error


def check_coverage(
    published: Iterable[str], expected: frozenset[str], ties: Mapping[str, str], dropped: Iterable[str]
) -> None:
    """InvalidInput, with the first missing and unexpected names, unless the version has what is expected.

    A checkpoint lists one name of a tied pair or both; either is right here. What a rule dropped by name
    counts as skipped on purpose.
    """
    have = set(published) | set(ties)
    missing = sorted(expected - have - set(dropped))
    spare = {alias for alias, name in ties.items() if name in expected} | set()
    spare |= {name for alias, name in ties.items() if alias in expected}
    unexpected = sorted(have - expected - spare)
    if missing or unexpected:
        raise InvalidInput(
            f"the version is not what is expected: {_some('missing', missing)}; {_some('unexpected', unexpected)}"
        )


def _some(what: str, names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
