"""A version for which there is no room is refused before an epoch is claimed: no trainer is fenced for it."""

from __future__ import annotations

import os

import pytest
import torch

from ckptsync import Channel, Publisher, preflight
from ckptsync.base import publish_base
from ckptsync.copies import compact
from ckptsync.errors import StoreFull


def files_below(root: str) -> list[str]:
    return sorted(os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)


@pytest.fixture
def full_disk(monkeypatch):
    def begin() -> None:
        monkeypatch.setattr(preflight, "free_bytes", lambda _: preflight.MARGIN)

    return begin


def test_publish_leaves_nothing_in_a_root_that_has_no_room(ckptsync, hf_folder, root, full_disk):
    full_disk()
    ran = ckptsync("publish", root, "--from", hf_folder())
    assert ran.code != 0
    assert "the version has 4.1 KB (4096 bytes), 67.1 MB are kept" in " ".join(ran.err.split())
    assert files_below(root) == []


def test_a_publisher_that_runs_is_not_fenced_by_one_that_has_no_room(ckptsync, hf_folder, root, full_disk, tmp_path):
    folder, copy = hf_folder(), str(tmp_path / "copy")
    for kind in ("full", "delta"):
        ckptsync("publish", root, "--from", folder, "--kind", kind)
    ckptsync("export", root, "1", copy)
    before = files_below(root)
    full_disk()
    assert ckptsync("publish", root, "--from", folder).code != 0
    assert ckptsync("import", root, copy).code != 0
    channel = Channel.open(root)
    assert channel.latest().kind == "delta"
    with pytest.raises(StoreFull):
        compact(channel, channel.latest())
    assert files_below(root) == before


def test_a_base_model_that_has_no_room_claims_nothing(hf_folder, root, full_disk):
    full_disk()
    with pytest.raises(StoreFull):
        publish_base(root, hf_folder())
    assert files_below(root) == []


def test_room_for_exactly_the_version_and_what_is_beside_it_is_enough(root, monkeypatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda _: preflight.MARGIN + 4096)
    with Publisher(root) as publisher:
        assert publisher.publish({"w": torch.ones(1024)}).version.number == 1
        with pytest.raises(StoreFull):
            publisher.publish({"w": torch.ones(1025)})
