"""Folders on file systems that do not have every call: a version is whole or not there, and the error is ours."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from ckptsync import Channel, Publisher
from ckptsync.errors import InvalidInput, StoreError
from ckptsync.store import LocalStore
from ckptsync.testing.filesystem import CALLS, refusing
from ckptsync.verify import verify_version

STATE = {"w": torch.arange(1000.0)}


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES, errno.ENOTSUP])
@pytest.mark.parametrize("mode", [None, 0o640])
@pytest.mark.parametrize("call", CALLS)
def test_a_publish_is_whole_or_an_error_of_ours_where_a_call_is_refused(
    tmp_path: Path, call: str, mode: int | None, error: int
) -> None:
    store = LocalStore(str(tmp_path), mode=mode) if mode is not None else LocalStore(str(tmp_path))
    refused = ""
    with refusing(call, error=error):
        try:
            with Publisher(store) as publisher:
                publisher.publish(STATE)
        except StoreError as raised:
            refused = str(raised)
    channel = Channel.open(LocalStore(str(tmp_path)))
    assert bool(refused) != bool(channel.committed()), refused
    for version in channel.committed():
        assert not verify_version(channel, version).problems
    with Publisher(LocalStore(str(tmp_path))) as publisher:
        publisher.publish(STATE)
    assert not verify_version(channel, channel.latest().id).problems, "and it goes on where the call is there again"


def test_a_call_that_cannot_be_refused_is_named() -> None:
    with (
        pytest.raises(InvalidInput, match=r"refusing\(mount\): use some of chmod, fsync, link, rename"),
        refusing("mount"),
    ):
        pass
