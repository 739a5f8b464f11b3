"""`ckptsync rollback`, and what `ls` and `show` say of it."""

from __future__ import annotations

from ckptsync.channel import Channel
from tests.retention.channels import Trainer


def test_it_says_what_it_did_and_ls_and_show_tell_whose_weights_they_are(ckptsync, root):
    Trainer(Channel.create(root)).publish(1, 2, 3)
    ran = ckptsync("rollback", root, "1", "--why", "reward collapsed")
    assert ran.code == 0, ran.err
    assert "e2-v4 is committed: the weights of e1-v1 after e1-v3, 0 bytes copied" in ran.out
    row = next(line for line in ckptsync("ls", root).out.splitlines() if "e2-v4" in line)
    assert "latest = e1-v1" in row
    assert ckptsync("ls", root, "--json").json["versions"][-1]["data_of"] == "e1-v1"
    shown = ckptsync("show", root).out
    assert "the weights of e1-v1 again" in shown
    assert "rolled back from e1-v3: reward collapsed" in " ".join(shown.split())


def test_the_newest_version_cannot_be_gone_back_to(ckptsync, root):
    Trainer(Channel.create(root)).publish(1)
    ran = ckptsync("rollback", root, "1", "--json")
    assert ran.code == 2
    assert ran.json["error"]["kind"] == "invalid-input"
