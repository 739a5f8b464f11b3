"""Versions as plain folders: whole, or not there at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptsync.channel import Channel
from ckptsync.copies import export_version
from ckptsync.errors import BadShard, InvalidInput
from ckptsync.manifest import Manifest
from tests.watcher.publish import TestPublisher


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Channel, Manifest]:
    """A version whose last file has another byte than was published."""
    root = str(tmp_path / "root")
    TestPublisher(root).publish()
    channel = Channel.open(root)
    manifest = channel.latest()
    name, _ = list(manifest.files())[-1]
    with open(f"{root}/{manifest.folder}/{name}", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    return channel, manifest


def test_a_failed_export_leaves_no_folder_that_it_made(damaged: tuple[Channel, Manifest], tmp_path: Path) -> None:
    with pytest.raises(BadShard):
        export_version(*damaged, str(tmp_path / "a" / "b"))
    assert sorted(os.listdir(tmp_path)) == ["root"]


def test_and_an_empty_folder_that_was_there_is_empty(damaged: tuple[Channel, Manifest], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    with pytest.raises(BadShard):
        export_version(*damaged, str(copy))
    assert os.listdir(copy) == []


def test_what_a_killed_export_left_is_called_that(damaged: tuple[Channel, Manifest], tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "config.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"without ckptsync.json it is no whole export"):
        export_version(*damaged, str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("place", "why"),
    [("s3://bucket/copy", "no local folder"), ("{}/file", "is not a folder"), ("{}/file/copy", "file is not a folder")],
)
def test_an_export_goes_into_a_local_folder(
    place: str, why: str, damaged: tuple[Channel, Manifest], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=why):
        export_version(*damaged, place.format(tmp_path))
