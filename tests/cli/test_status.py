"""`ckptsync status`."""

from __future__ import annotations

import json

import pytest

from ckptsync import holds
from ckptsync.channel import Channel
from ckptsync.store import put_bytes
from ckptsync.version import VersionId
from tests.retention.channels import Trainer


@pytest.fixture
def channel(root):
    trainer = Trainer(Channel.create(root))
    trainer.publish(*range(1, 8))
    Trainer(trainer.channel, VersionId(1, 6)).publish(7)
    trainer.channel.write_receipt("[box]-1", {"label": "e1-v6", "state": "serving", "version": "e1-v6", "since": 1.0})
    holds.pin(trainer.channel, VersionId(1, 5), "for the paper")
    return trainer.channel


def line_with(text: str, words: str) -> str:
    return next(line for line in text.splitlines() if words in line)


def test_the_channel_at_a_glance(ckptsync, channel, root):
    ran = ckptsync("status", root, "--last", 4)
    assert ran.code == 0, ran.err
    assert "8 versions, newest e2-v7" in ran.out
    assert "dead branch" in line_with(ran.out, "e1-v7")
    assert "[box]-1" in line_with(ran.out, "e1-v6 ")
    assert "latest" in line_with(ran.out, "e2 from e1-v6")
    assert "and 3 before" in ran.out
    assert "1 version, " in line_with(ran.out, "serving e1-v6")
    assert "e1-v5 is pinned: for the paper" in ran.out


def test_as_json_it_is_one_document(ckptsync, channel, root):
    status = ckptsync("status", root, "--json").json
    assert status["newest"] == "e2-v7"
    assert status["readers"][0]["serves"] == "e1-v6"
    assert len(status["versions"]) == 8


def test_watching_shows_what_is_new(ckptsync, channel, root, monkeypatch):
    looks = []

    def publish_then_stop(_: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt
        channel.write_receipt("[box]-1", {"label": "e2-v7", "state": "serving"})

    monkeypatch.setattr("ckptsync.cli.status.time.sleep", publish_then_stop)
    ran = ckptsync("status", root, "--watch", "--json")
    assert ran.code == 130
    assert [json.loads(line)["readers"][0]["lag"] for line in ran.out.splitlines()] == [1, 0]
    looks.clear()
    shown = ckptsync("status", root, "--watch")
    assert shown.code == 130
    assert "e2-v7" in shown.out


def test_a_channel_without_versions_and_one_with_damage_have_a_status(ckptsync, root):
    Channel.create(root)
    assert "0 versions; " in ckptsync("status", root).out
    put_bytes(Channel.open(root).store, "leases/x.json", b"{")
    ran = ckptsync("status", root)
    assert ran.code == 0
    assert "leases/x.json cannot be read" in ran.out
