"""What is posted to the ranks of an engine is heard by those that live, and by nobody else."""

from __future__ import annotations

import os
import queue
from typing import Any

from watchers.live.mailbox import PREFIX, listen, open_mailbox, post


def test_every_line_is_heard_by_every_rank_that_listens(tmp_path: Any) -> None:
    folder = open_mailbox(str(tmp_path), "boot")
    ranks: list[queue.Queue[bytes]] = [queue.Queue(), queue.Queue()]
    for rank, heard in enumerate(ranks):
        listen(folder, rank, heard.put)
    assert post(folder, 2, b"one")
    assert post(folder, 2, b"two")
    for heard in ranks:
        assert [heard.get(timeout=60), heard.get(timeout=60)] == [b"one\n", b"two\n"]


def test_a_rank_that_does_not_listen_or_is_gone_is_told(tmp_path: Any) -> None:
    folder = open_mailbox(str(tmp_path), "boot")
    assert not post(folder, 1, b"words")
    os.mkfifo(os.path.join(folder, "rank-0"))
    assert not post(folder, 1, b"words")
    listen(folder, 0, lambda line: None)
    assert post(folder, 1, b"words")
    assert not post(folder, 2, b"words")


def test_a_mailbox_that_nobody_reads_any_more_is_removed(tmp_path: Any) -> None:
    live, dead, _new = (open_mailbox(str(tmp_path), name) for name in ("live", "dead", "new"))
    os.mkfifo(os.path.join(dead, "rank-0"))
    listen(live, 0, lambda line: None)
    open_mailbox(str(tmp_path), "newer")
    assert sorted(os.listdir(tmp_path)) == [PREFIX + "live", PREFIX + "new", PREFIX + "newer"]
