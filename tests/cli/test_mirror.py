from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from ckptsync.channel import Channel
from ckptsync.layout import manifest_path
from ckptsync.version import VersionId
from tests.mirror.channels import Trainer, content, numbers
from tests.waiting import until


@pytest.fixture
def target(tmp_path):
    return str(tmp_path / "mirror")


def test_mirror_says_what_it_copied_and_the_second_time_that_there_is_nothing(ckptsync, root, target):
    Trainer(root).publish(1, 2)
    first = ckptsync("mirror", root, target)
    assert (first.code, first.out.count("mirrored")) == (0, 2)
    assert "2 versions copied (200.0 KB)" in first.out
    assert f"{target} is at e1-v2" in first.out
    assert ckptsync("mirror", root, target, "--json").json == {
        "copied": [], "repaired": [], "skipped": {}, "bytes": 0, "collected": [],
    }  # fmt: skip


def test_mirror_keeps_the_newest_and_ends_badly_if_a_version_was_passed_over(ckptsync, root, target):
    trainer = Trainer(root)
    trainer.publish(1, 2, 3)
    assert ckptsync("mirror", root, target, "--keep-last", 2, "--kinds", "full", "--json").json["copied"] == [
        "e1-v2", "e1-v3",
    ]  # fmt: skip
    trainer.publish(4)
    with open(os.path.join(root, manifest_path(VersionId(1, 4))), "a") as file:
        file.write("torn")
    done = ckptsync("mirror", root, target, "--json")
    assert (done.code, list(done.json["skipped"])) == (1, ["e1-v4"])


def test_mirror_refuses_what_cannot_be_meant(ckptsync, root, target):
    Trainer(root).publish(1)
    itself = ckptsync("mirror", root, root)
    assert (itself.code, "cannot be a mirror of itself" in itself.err) == (2, True)
    for wrong in (["--kinds", "whole"], ["--rate", "fast"], ["--max-age", "1d"], ["--keep-last", "1"]):
        assert ckptsync("mirror", root, target, *wrong).code == 2
    assert ckptsync("mirror", root + "x", target).code == 2
    with open(target + "file", "w") as file:
        file.write("hello")
    ran = ckptsync("mirror", root, target + "file")
    assert (ran.code, "is not a folder" in ran.err) == (2, True)
    Trainer(target)
    assert "not-a-mirror" in ckptsync("mirror", root, target).err


def test_mirror_follow_brings_each_version_until_it_is_told_to_end(root, target):
    trainer = Trainer(root)
    trainer.publish(1)
    command = [sys.executable, "-m", "ckptsync.cli", "mirror", root, target, "--follow", "--json", "--poll", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: numbers(target) == [1])
            trainer.publish(2)
            until(lambda: Channel.open(target).poll() == VersionId(1, 2))
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert [json.loads(line)["copied"] for line in said.splitlines()] == [["e1-v1"], ["e1-v2"]]


def test_another_model_published_to_a_mirror_is_told_that_it_is_a_mirror(ckptsync, root, target, hf_folder):
    Trainer(root).publish(1)
    ckptsync("mirror", root, target)
    ran = ckptsync("publish", target, "--from", hf_folder(), "--json")
    assert (ran.code, ran.json["error"]["kind"]) == (1, "is-mirror")
    assert "--allow-schema-change" not in ran.err


def test_a_damaged_mirror_is_told_its_source_by_every_command_and_healed_by_a_repair(ckptsync, root, target, tmp_path):
    Trainer(root).publish(1, 2)
    ckptsync("mirror", root, target)
    (shard,) = (tmp_path / "mirror" / "data").glob("e0001-v00000002-*/*.safetensors")
    shard.write_bytes(bytes(shard.stat().st_size))
    remedy = f"`ckptsync mirror {root} {target} --repair`"
    assert remedy in ckptsync("verify", target).out
    shard.unlink()
    assert remedy in ckptsync("fsck", target).out
    assert remedy in " ".join(check["remedy"] for check in ckptsync("doctor", target, "--json").json["checks"])
    refused = ckptsync("fsck", target, "--repair", "--json")
    assert (refused.code, refused.json["error"]["kind"]) == (1, "is-mirror")
    shard.write_bytes(b"x" * 100_000)
    done = ckptsync("mirror", root, target, "--repair")
    assert (done.code, "1 version repaired: e1-v2" in done.out) == (0, True)
    assert shard.read_bytes() == content(2)
    assert ckptsync("mirror", root, target, "--repair", "--follow").code == 2
