"""Something else lies where a file was: every command that looks at the channel says what, and of which version."""

from __future__ import annotations

import os

import pytest

from ckptsync.channel import Channel
from ckptsync.layout import manifest_path
from ckptsync.store import LocalStore
from ckptsync.sweep import sweep_debris
from ckptsync.version import VersionId
from tests.retention.channels import Trainer, collect, with_data

SECOND = VersionId(1, 2)


@pytest.fixture
def three(root):
    Trainer(Channel.create(root)).publish(1, 2, 3)
    return LocalStore(root)


def folder(path: str) -> None:
    os.mkdir(path)


def link(path: str) -> None:
    os.rename(f"{path}.aside", f"{path}.else")
    os.symlink(f"{path}.else", path)


def pipe(path: str) -> None:
    os.mkfifo(path)


def replaced(root: str, path: str, make) -> None:
    whole = os.path.join(root, path)
    os.rename(whole, f"{whole}.aside")
    make(whole)


@pytest.mark.parametrize(("make", "kind"), [(folder, "a folder"), (link, "a symbolic link"), (pipe, "a special file")])
def test_a_manifest_that_is_no_file_is_named_by_every_command(make, kind, ckptsync, three, root):
    path = manifest_path(SECOND)
    replaced(root, path, make)
    ran = {
        "fsck": ckptsync("fsck", root),
        "verify": ckptsync("verify", root),
        "show": ckptsync("show", root, "2"),
    }
    for name, done in ran.items():
        said = " ".join((done.out + done.err).split())
        assert done.code == (0 if name == "fsck" else 1), f"{name}: latest is not made from it"
        assert "e1-v2" in said, name
        assert f"{path} is {kind}, not a file" in said, name
    for name in ("status", "ls"):
        assert f"{path} is {kind}" in " ".join(ckptsync(name, root).out.split()), name
    assert [row["version"] for row in ckptsync("ls", root, "--json").json["versions"]] == ["e1-v1", "e1-v2", "e1-v3"]


def test_doctor_calls_a_channel_bad_in_which_a_manifest_is_no_file(ckptsync, three, root, tmp_path):
    replaced(root, manifest_path(SECOND), folder)
    checks = ckptsync("doctor", root, "--stage", tmp_path / "stage", "--json").json["checks"]
    (versions,) = [check for check in checks if check["name"] == "versions"]
    assert versions["status"] == "bad"
    assert f"e1-v2: {manifest_path(SECOND)} is a folder" in versions["detail"]


def test_the_data_of_a_version_whose_manifest_is_no_file_are_no_debris(three, root):
    replaced(root, manifest_path(SECOND), folder)
    channel = Channel.open(root)
    later = channel.claim_epoch("later")
    sweep_debris(channel, later, grace=-1e9)
    collect(three)
    assert with_data(three)[2] == 3


def test_fsck_ends_badly_if_it_is_the_manifest_of_the_newest_version_that_is_no_file(ckptsync, three, root):
    replaced(root, manifest_path(VersionId(1, 3)), folder)
    ran = ckptsync("fsck", root)
    assert (ran.code, "left behind" in ran.out) == (1, False)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (folder, "a folder is there, not a file"),
        (link, "a symbolic link below the root is not followed"),
        (pipe, "a special file is there, not a file"),
        (lambda _: None, "is not there"),
    ],
)
def test_fsck_says_what_lies_in_the_place_of_a_shard(make, said, ckptsync, three, root):
    manifest = Channel.open(root).manifest(SECOND)
    (name, _), *_ = manifest.files()
    replaced(root, f"{manifest.folder}/{name}", make)
    (finding,) = ckptsync("fsck", root, "--json").json["findings"]
    assert (finding["version"], finding["lost"]) == ("e1-v2", True)
    assert name in finding["message"]
    assert said in finding["message"]
