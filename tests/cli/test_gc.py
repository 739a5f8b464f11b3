"""`ckptsync gc`."""

from __future__ import annotations

import pytest

from ckptsync.channel import Channel
from ckptsync.cli.newest import ranges
from ckptsync.errors import StoreDenied
from ckptsync.store import LocalStore
from ckptsync.version import VersionId
from tests.retention.channels import Trainer, numbers, with_data


@pytest.fixture
def six(root):
    Trainer(Channel.create(root)).publish(1, 2, 3, 4, 5, 6)
    return LocalStore(root)


def test_a_dry_run_says_what_would_go_and_why_the_rest_stays_and_deletes_nothing(ckptsync, six, root):
    ran = ckptsync("gc", root, "--keep-last", 2, "--keep-every", 3, "--dry-run")
    assert ran.code == 0, ran.err
    lines = [line.strip().split(maxsplit=2) for line in ran.out.splitlines()[1:]]
    assert lines[0] == ["e1-v1", "would", "go"]
    assert lines[2] == ["e1-v3", "stays", "its number is a multiple of 3"]
    plan = ckptsync("gc", root, "--keep-last", 2, "--dry-run", "--json").json
    assert plan["go"] == ["e1-v4", "e1-v3", "e1-v2", "e1-v1"]
    assert plan["keep"] == {"e1-v5": "among the 2 newest", "e1-v6": "the newest"}
    assert numbers(six) == [1, 2, 3, 4, 5, 6]


def test_versions_go_and_their_data_after_the_grace_time(ckptsync, six, root, monkeypatch):
    ran = ckptsync("gc", root, "--keep-last", 4)
    assert "2 versions deleted (e1-v1 to e1-v2), 0 B of data freed" in ran.out
    assert "the data of 2 versions wait: they go 6 min after their version" in ran.out
    assert len(with_data(six)) == 6
    monkeypatch.setattr("ckptsync.store.clock.MARGIN", -3600.0)
    again = ckptsync("gc", root, "--keep-last", 4, "--json").json
    assert again == {"versions": [], "files": 6, "bytes": 600, "waiting": 0, "unfinished": 0}
    assert sorted(with_data(six)) == [3, 4, 5, 6]


def test_limits_are_given_in_units(ckptsync, six, root):
    plan = ckptsync("gc", root, "--keep-last", 2, "--max-bytes", "1K", "--dry-run", "--json").json
    assert plan["go"] == ["e1-v3", "e1-v2", "e1-v1"], "three of 300 bytes fit"
    kept = ckptsync("gc", root, "--keep-last", 2, "--max-age", "7d", "--dry-run", "--json").json["keep"]
    assert len(kept) == 6


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--keep-last", 1], "keep_last=1"), (["--keep-last", 2, "--max-age", "soon"], "--max-age"), ([], "--keep-last")],
)
def test_what_cannot_be_meant_is_a_usage_error(ckptsync, six, root, options, named):
    ran = ckptsync("gc", root, *options)
    assert ran.code == 2
    assert named in ran.err
    assert numbers(six) == [1, 2, 3, 4, 5, 6]


def test_a_root_that_may_only_be_read_has_its_dry_run(ckptsync, six, root, monkeypatch):
    def denied(*_: object) -> None:
        raise StoreDenied("read-only")

    monkeypatch.setattr(LocalStore, "write", denied)
    assert ckptsync("gc", root, "--keep-last", 2, "--dry-run", "--json").json["go"]


def test_without_a_grace_time_it_says_what_the_data_wait_for(ckptsync, six, root):
    ran = ckptsync("gc", root, "--keep-last", 2, "--grace", "0s")
    assert "the data of 4 versions wait: they go 60.0 s after their version (--grace and a minute" in ran.out


def test_many_versions_are_named_by_their_ranges():
    versions = [VersionId(1, number) for number in range(1, 121)]
    assert ranges(versions) == "e1-v1 to e1-v120"
    assert ranges([*versions[:2], VersionId(1, 9), VersionId(2, 10)]) == "e1-v1 to e1-v2, e1-v9, e2-v10"
    assert ranges(versions[::2]) == "e1-v1, e1-v3, e1-v5, e1-v7, e1-v9, ... e1-v119"
