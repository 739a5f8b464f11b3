"""How numbers are said."""

from __future__ import annotations

import pytest

from ckptsync.wording import counted

SAID = {0: "0 versions", 1: "1 version", 2: "2 versions", 12_000: "12,000 versions"}


@pytest.mark.parametrize("number", SAID)
def test_one_is_singular(number: int) -> None:
    assert counted(number, "version") == SAID[number]
