"""What is said of a version that was asked for and is not there."""

from __future__ import annotations

import pytest

from ckptsync.absent import absent
from ckptsync.epochs import Epoch
from ckptsync.errors import NotFound, VersionGone, VersionNotFound
from ckptsync.version import VersionId, parse_query

CLAIMS = {
    1: Epoch(number=1, nonce="a", run_id="r", host="h", created=0.0),
    2: Epoch(number=2, nonce="b", run_id="r", host="h", created=0.0, resumed_from=VersionId(1, 5), next_number=6),
}
COMMITTED = [VersionId(2, 8), VersionId(2, 9)]


def said(asked: str, noted: tuple[VersionId, ...] = ()) -> NotFound:
    return absent("/nfs/run", parse_query(asked), COMMITTED, CLAIMS, noted)


@pytest.mark.parametrize("asked", ["3", "7", "e1-v2", "e2-v6"])
def test_a_number_that_was_passed_is_gone_and_nobody_claims_to_know_more(asked):
    error = said(asked)
    assert isinstance(error, VersionGone)
    assert "it was collected, or never published under this number" in str(error)


@pytest.mark.parametrize(("asked", "noted"), [("e1-v5", ()), ("5", ()), ("7", (VersionId(2, 7),))])
def test_a_version_that_is_known_to_have_been_there_was_collected(asked, noted):
    error = said(asked, noted)
    assert isinstance(error, VersionGone)
    assert str(error) == f"{asked} was collected from /nfs/run: it is gone"


@pytest.mark.parametrize("asked", ["10", "e2-v10", "e2-v3", "e3-v9", "e1-v6", "0"])
def test_a_version_that_cannot_have_been_there_is_not_found(asked):
    error = said(asked)
    assert isinstance(error, VersionNotFound)
    assert f"no complete version {asked}" in str(error)


def test_the_newest_is_named():
    assert str(said("10")) == "/nfs/run has no complete version 10: the newest is e2-v9"
    assert str(said("e2-v10")).endswith("the newest of that attempt is e2-v9")


def test_a_version_that_is_not_there_is_not_named_as_the_newest():
    assert str(said("e1-v6")) == "/nfs/run has no complete version e1-v6: the newest is e2-v9"
