"""A stage on a disk that runs full at any byte, or whose calls fail: one of our errors, and whole later."""

from __future__ import annotations

import errno
import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.errors import StoreError, StoreFull
from ckptsync.layout import SELF_COPY
from tests.calls import failing_at
from tests.chaos.disks import disk
from watchers.stage import Stage

from .publish import TestPublisher

PAGE = os.sysconf("SC_PAGE_SIZE")


def test_a_stage_that_runs_full_at_any_page_says_so_and_is_whole_once_there_is_room(
    root: str, publisher: TestPublisher, tmp_path: Path
) -> None:
    manifest = publisher.publish()
    outcomes = []
    for pages in range(1, 24):
        with disk(str(tmp_path / f"disk-{pages}"), 32 * PAGE) as small:
            if not small.small:
                pytest.skip("needs the right to mount a tmpfs")
            stage = Stage(f"{small.folder}/stage")
            small.fill(but=pages * PAGE)
            outcomes.append(_staged_on_a_full_disk(stage, root, manifest))
            small.free()
            version = stage.stage(Channel.open(root), manifest)
            assert os.path.exists(f"{version.folder}/{SELF_COPY}")
    assert outcomes[0] == "full"
    assert outcomes[-1] == "whole"


def _staged_on_a_full_disk(stage: Stage, root: str, manifest: Any) -> str:
    try:
        stage.release(stage.stage(Channel.open(root), manifest))
    except StoreFull:
        return "full"
    return "whole"


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_whichever_call_on_the_stage_fails_it_is_an_error_of_ours_and_whole_later(
    root: str, publisher: TestPublisher, folder: str, error: int
) -> None:
    channel, manifest = Channel.open(root), publisher.publish()
    for number in itertools.count():
        where = f"{folder}-{number}"
        with failing_at(where, number, error) as calls, suppress(StoreError):
            Stage(where).stage(channel, manifest)
        if calls() <= number:
            break
        assert os.path.exists(f"{Stage(where).stage(channel, manifest).folder}/{SELF_COPY}")
    assert number > 15, "calls that were tried"
