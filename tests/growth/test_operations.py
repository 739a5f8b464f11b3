"""What grows with what: counted, so that the answer is the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.growth import exponent
from benchmarks.growth_channels import channel_with
from ckptsync import collect, committing
from ckptsync.channel import LIST_EVERY, Channel
from ckptsync.collect import Collector
from ckptsync.manifest import FileEntry, Manifest, Track, decode
from ckptsync.publish import Publisher
from ckptsync.resume_search import Offer, offered
from ckptsync.retention import Retention
from ckptsync.shards.read import Header, StoredTensor, check_header
from ckptsync.testing import CountingStore, Counts, MemoryStore
from ckptsync.testing.stores import Undeletable
from ckptsync.version import VersionId
from tests.core.manifests import manifest, tensor
from tests.retention.channels import Trainer
from watchers import journal

FEW, MANY = 10, 990
"""Both are one page of a listing."""


def asked(act: Callable[[CountingStore], object], versions: int) -> Counts:
    store = CountingStore(channel_with(versions))
    before = store.counts - Counts()
    act(store)
    return store.counts - before


def requests(act: Callable[[CountingStore], object], versions: int) -> int:
    return asked(act, versions).requests


def polls(store: CountingStore) -> None:
    channel = Channel.open(store)
    for _ in range(5 * LIST_EVERY):
        channel.poll()


def test_a_poll_costs_as_much_with_many_versions_as_with_few():
    assert requests(polls, FEW) == requests(polls, MANY) < 5 * LIST_EVERY + 20


def test_a_publish_costs_as_much_with_many_versions_as_with_few():
    torch = pytest.importorskip("torch")

    def publishes(store: CountingStore) -> None:
        with closing(Publisher(store, sweep_after=None)) as publisher:
            publisher.publish({"w": torch.zeros(8)})

    few, many = asked(publishes, FEW), asked(publishes, MANY)
    assert few.requests == many.requests < 30
    assert few.puts == many.puts


def test_resuming_reads_the_newest_manifest_and_not_all_of_them():
    def search(store: CountingStore) -> None:
        with closing(offered(Channel.open(store), "latest", False)) as offers:
            assert isinstance(next(offers), Offer)

    assert asked(search, FEW).gets == asked(search, MANY).gets < 10


def test_resuming_with_trainer_state_reads_each_manifest_twice_at_most_when_none_has_any():
    def search(store: CountingStore) -> None:
        with closing(offered(Channel.open(store), "latest", True)) as offers:
            assert isinstance(next(offers), Offer)

    assert asked(search, 100).gets <= 2 * 100 + 10


def test_a_collector_reads_a_manifest_once_however_often_it_runs():
    store = CountingStore(channel_with(MANY))
    collector = Collector(Channel.open(store), Retention(keep_last=2, keep_every=1))
    collector.collect()
    before = store.counts - Counts()
    collector.collect()
    assert (store.counts - before).requests < 30


def test_whether_one_version_is_still_there_does_not_take_a_listing_of_all():
    store = CountingStore(channel_with(FEW))
    before = store.counts - Counts()
    Channel.open(store).check_still_there(VersionId(1, 3))
    assert store.counts - before == Counts(gets=1)


def test_a_store_that_refuses_every_deletion_is_asked_once_for_each_and_decided_on_once(monkeypatch):
    decided = []
    decide = collect.decide
    monkeypatch.setattr(collect, "decide", lambda *a, **k: (decided.append(1), decide(*a, **k))[1])
    counts = []
    for versions in (10, 40):
        inner = MemoryStore()
        Trainer(Channel.create(inner)).publish(*range(1, versions + 1))
        store = Undeletable(inner, lambda path: path.startswith("manifests/"))
        decided.clear()
        done = Collector(Channel.open(store), Retention(keep_last=2, grace=0.0)).collect()
        assert done.versions == ()
        counts.append(len(decided))
    assert counts[0] == counts[1], "the decision looks at every version, so it may not be made for every version"


def test_the_journal_of_a_stage_is_parsed_once_not_once_for_each_file(tmp_path: Path, monkeypatch):
    parsed = []
    parse = journal._parse
    monkeypatch.setattr(journal, "_parse", lambda raw: (parsed.append(raw), parse(raw))[1])
    entries = {}
    for at in range(50):
        path = tmp_path / f"{at}"
        path.write_bytes(b"shard")
        entries[str(path)] = FileEntry(name=path.name, size=5, digest="d")
    mine = journal.Journal(str(tmp_path / ".journal"))
    for path, entry in entries.items():
        mine.add(path, entry)
        assert mine.vouches(path, entry)
    assert all(mine.vouches(path, entry) for path, entry in entries.items())
    assert len([raw for raw in parsed if raw]) == len(entries)


def test_a_journal_that_was_made_anew_is_read_anew(tmp_path: Path):
    path, entry = tmp_path / "shard", FileEntry(name="shard", size=5, digest="d")
    path.write_bytes(b"shard")
    mine = journal.Journal(str(tmp_path / ".journal"))
    mine.add(str(path), entry)
    assert mine.vouches(str(path), entry)
    (tmp_path / ".journal").unlink()
    assert not mine.vouches(str(path), entry)
    mine.add(str(path), entry)
    assert mine.vouches(str(path), entry)


class Walked(tuple):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self):
        Walked.times += 1
        return super().__iter__()


def test_the_tensors_of_a_version_are_gone_through_once_for_all_its_files():
    rows = Walked(tensor(f"w{at}", file=f"{at}.safetensors") for at in range(30))
    files = tuple(FileEntry(name=f"{at}.safetensors", size=8, digest="") for at in range(30))
    track = Track(files=files, tensors=rows)
    Walked.times = 0
    for file, row in zip(files, [rows[at] for at in range(30)], strict=True):
        check_header(Header({row.name: StoredTensor(row.spec, 0)}, 0, 8, {}), file, track)
    assert Walked.times == 1


def test_a_commit_parses_a_manifest_that_was_sealed_no_more(monkeypatch):
    parsed = []
    monkeypatch.setattr(committing, "decode", lambda *a, **k: (parsed.append(1), decode(*a, **k))[1])
    made, store = manifest(), MemoryStore()
    assert committing.create_manifest(store, made) == made
    assert parsed == []
    unsealed = Manifest(**{name: getattr(made, name) for name in made.__struct_fields__})
    committing.create_manifest(MemoryStore(), unsealed)
    assert parsed == [1], "what nobody has looked at is looked at before it is committed"


@pytest.mark.parametrize(("power", "found"), [(0, 0.0), (1, 1.0), (2, 2.0)])
def test_an_exponent_is_the_slope_of_its_curve(power: int, found: float):
    assert exponent([(size, 3.0 * size**power) for size in (10, 100, 1000)], 0) == pytest.approx(found)
