"""`ckptsync pin` and `unpin`."""

from __future__ import annotations

from ckptsync.channel import Channel
from tests.retention.channels import Trainer


def go(ckptsync, root):
    return ckptsync("gc", root, "--keep-last", 2, "--dry-run", "--json").json["go"]


def test_a_pinned_version_stays_until_it_is_unpinned(ckptsync, root):
    Trainer(Channel.create(root)).publish(1, 2, 3, 4)
    assert ckptsync("pin", root, "1", "--why", "table 3 [draft]").out == "e1-v1 is pinned: table 3 [draft]\n"
    assert go(ckptsync, root) == ["e1-v2"]
    keep = ckptsync("gc", root, "--keep-last", 2, "--dry-run", "--json").json["keep"]
    assert keep["e1-v1"] == "pinned: table 3 [draft]"
    assert ckptsync("unpin", root, "e1-v1", "--json").json == {"version": "e1-v1", "pinned": False}
    assert go(ckptsync, root) == ["e1-v2", "e1-v1"]


def test_a_pin_says_why_and_a_version_that_is_not_there_cannot_have_one(ckptsync, root):
    Trainer(Channel.create(root)).publish(1)
    assert ckptsync("pin", root, "1").code == 2
    missing = ckptsync("pin", root, "9", "--why", "x")
    assert missing.code == 1
    assert "no complete version 9" in missing.err
    assert "not pinned" in ckptsync("unpin", root, "1").err
