"""What a host does to a fleet passes: no more files, no more threads, a full folder of claims."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptsync.cli.engines import connect
from tests.chaos.disks import disk
from tests.host import files, threads
from tests.waiting import until
from tests.watcher.publish import TestPublisher
from watchers.claims import claimed
from watchers.fleet import Fleet
from watchers.roster import EnginesFile, Roster, Router

NOBODY = "http://127.0.0.1:1"


@contextmanager
def fleet_of(root: str, tmp_path: Path, name: str) -> Iterator[Fleet]:
    """Found in a file, and by a router that does not answer. Real adapters, whose clients open files."""
    listed = tmp_path / f"engines-{name}"
    listed.write_text(f"{NOBODY}\n", encoding="utf-8")
    roster = Roster([EnginesFile(str(listed)), Router(NOBODY)])
    options: dict[str, Any] = {"stage": str(tmp_path / f"stage-{name}"), "poll": 0.01, "deadline": 5, "events": False}
    fleet = Fleet(root, roster, partial(connect, "vllm"), **options)
    fleet.channel.store.deadline = 0.05  # type: ignore[attr-defined]
    try:
        yield fleet
    finally:
        fleet.close()


def watched(fleet: Fleet) -> bool:
    fleet.step()
    return [member.gone for member in fleet._members.present()] == [False]


@pytest.mark.parametrize("limit", [files, threads])
def test_a_fleet_goes_on_where_its_host_gives_no_more_files_or_threads(
    root: str, publisher: TestPublisher, tmp_path: Path, limit: Callable[[int], Any]
) -> None:
    publisher.publish()
    for count in (0, 1, 2):
        with fleet_of(root, tmp_path, f"{limit.__name__}-{count}") as fleet:
            with limit(count):
                fleet.step()
                said = fleet.health.reason
            assert "ulimit" in said or count > 0, said
            until(lambda fleet=fleet: watched(fleet))


def test_a_folder_of_claims_that_is_full_does_not_keep_an_engine_from_being_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk(str(tmp_path / "tmp"), 8 * os.sysconf("SC_PAGE_SIZE")) as full:
        if not full.small:
            pytest.skip("needs the right to mount a tmpfs")
        monkeypatch.setattr(tempfile, "tempdir", full.folder)
        full.fill()
        with claimed(str(tmp_path / "stage"), NOBODY, "s3://bucket/ours"):
            pass
