"""A manifest that is no version, under the name that the live trainer commits next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckptsync import Publisher
from ckptsync.errors import BadManifest

WEIGHTS = {"w": torch.zeros(3)}


@pytest.mark.parametrize("what", ["torn", "another version's"])
def test_it_is_named_with_the_remedy_until_it_is_deleted(what: str, tmp_path: Path) -> None:
    remedy = "is in the way, and no version: .* delete it and try again"
    with Publisher(str(tmp_path)) as publisher:
        publisher.publish(WEIGHTS)
        first, second = (tmp_path / "manifests" / f"e0001-v0000000{number}.json" for number in (1, 2))
        second.write_bytes(b"{" if what == "torn" else first.read_bytes())
        for _ in range(2):
            with pytest.raises(BadManifest, match=f"^{second} {remedy}"):
                publisher.publish(WEIGHTS)
        os.remove(second)
        assert publisher.publish(WEIGHTS).version.label == "e1-v2"


def test_an_attempt_that_is_started_anew_goes_on_after_it(tmp_path: Path) -> None:
    with Publisher(str(tmp_path)) as publisher:
        publisher.publish(WEIGHTS)
    (tmp_path / "manifests" / "e0001-v00000002.json").write_bytes(b"{")
    with Publisher(str(tmp_path)) as publisher:
        assert publisher.publish(WEIGHTS).version.label == "e2-v3"
