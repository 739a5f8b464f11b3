"""Several ranks write one version: who writes what, and what is left when one of them fails."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from ckptsync.channel import Channel
from ckptsync.errors import StoreDenied, StoreFull
from ckptsync.publish import Publisher
from ckptsync.ranks import Ranks
from ckptsync.shares import writing_ranks
from ckptsync.store import open_store
from ckptsync.testing.hooks import CHANGES, Failing, HookedStore, Recorder, matching
from ckptsync.verify import verify_version
from tests.trainer.models import TinyModel, reference, same, shard
from tests.trainer.ranks_harness import Caught, catching, returned, run_ranks
from tests.trainer.test_sources import loaded

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def publish_with_all_writers(rank: int, root: str) -> dict[str, object]:
    recorder = Recorder()
    model = shard(TinyModel(blocks=16))
    with Publisher(root) as alone:
        digests = [alone.publish(model).content_digest]
    with Publisher(HookedStore(open_store(root), recorder), writers="all", shard_bytes=4000) as together:
        recorder.seen.clear()
        digests.append(together.publish(model).content_digest)
        wrote = [path.rpartition("/")[2] for operation, path in recorder.changes() if operation == "commit"]
        digests.append(together.publish(model, background=True).result().content_digest)
    return {"wrote": wrote, "changes": recorder.changes(), "digests": digests}


def test_case_24_every_rank_writes_a_balanced_share_of_whole_layers_and_nobody_anothers_file(tmp_path: object) -> None:
    root = str(tmp_path)
    facts = returned(run_ranks(4, publish_with_all_writers, root))
    assert len({digest for fact in facts for digest in fact["digests"]}) == 1, "the same content, whoever writes"

    channel = Channel.open(root)
    manifest = channel.resolve("2")
    same(loaded(root, manifest), reference(TinyModel(blocks=16)))
    for version in channel.committed():
        assert verify_version(channel, version).ok
    track = manifest.tracks["model"]
    files = [[name for name in fact["wrote"] if name.endswith("safetensors")] for fact in facts]
    listed = sorted(file.name for file in track.files if file.name.endswith("safetensors"))
    assert sorted(name for names in files for name in names) == listed
    assert all(files), "each wrote some, and none twice"
    shares = [sum(t.spec.nbytes for t in track.tensors if t.file in names) for names in files]
    layer = max(sum(t.spec.nbytes for t in track.tensors if t.name.startswith(f"layers.{n}.")) for n in range(16))
    assert max(shares) - min(shares) <= 2 * layer, shares
    for n in range(16):
        assert len({t.file for t in track.tensors if t.name.startswith(f"layers.{n}.")}) == 1, "whole layers"
    others = [path for fact in facts[1:] for _, path in fact["changes"]]
    assert all(path.endswith(".safetensors") for path in others), "only rank 0 commits"


def find_writers(rank: int) -> dict[str, tuple[int, ...]]:
    ranks = Ranks(timeout=30)
    found = {"one host": writing_ranks("node", ranks), "all": writing_ranks("all", ranks)}
    socket.gethostname = lambda: f"host {rank // 2}"
    found["by host"] = writing_ranks("node", ranks)
    os.environ["LOCAL_RANK"] = str((rank + 1) % 3)
    found["by local rank"] = writing_ranks("node", ranks)
    ranks.close()
    return found


def test_one_rank_of_each_node_writes_by_local_rank_or_by_host_and_rank_0_always() -> None:
    facts = returned(run_ranks(4, find_writers))
    assert all(fact == facts[0] for fact in facts)
    assert facts[0] == {"one host": (0,), "all": (0, 1, 2, 3), "by host": (0, 2), "by local rank": (0, 2)}


def fail_on_another_rank(rank: int, root: str) -> dict[str, Caught]:
    errors: dict[str, Caught] = {}
    full = Failing(lambda: StoreFull("disk quota exceeded"), matching("commit", suffix=".safetensors"), times=1)
    store = HookedStore(open_store(root), full if rank == 1 else lambda *_: None)
    with Publisher(store, writers="all", shard_bytes=2000, bucket_bytes=512) as publisher:
        model = shard(TinyModel())
        with catching(errors, "full"):
            publisher.publish(model)
        dist.barrier()  # both have taken their files away
        errors["left"] = sorted(os.listdir(os.path.join(root, "data"))) if rank == 0 else []
        dist.barrier()
        publisher.publish(model)
    return errors


def test_a_writer_that_fails_fails_all_and_every_rank_takes_its_own_files_away(tmp_path: object) -> None:
    root = str(tmp_path)
    zero, one = returned(run_ranks(2, fail_on_another_rank, root))
    assert zero["full"].message == one["full"].message == "rank 1: disk quota exceeded"
    assert one["full"].cause == "StoreFull"
    assert zero["left"] == []
    assert [str(version) for version in Channel.open(root).committed()] == ["e1-v1"]
    assert len(os.listdir(os.path.join(root, "data"))) == 1


def fail_at_commit(rank: int, root: str) -> dict[str, Caught]:
    errors: dict[str, Caught] = {}
    denied = Failing(lambda: StoreDenied("may not"), matching("create", part="manifests/"), times=1)
    with Publisher(HookedStore(open_store(root), denied if rank == 0 else lambda *_: None), writers="all") as publisher:
        with catching(errors, "commit"):
            publisher.publish({"l.0.w": torch.ones(2), "l.1.w": torch.ones(2)})
        done = publisher.publish({"l.0.w": torch.ones(2), "l.1.w": torch.ones(2)}, number=1)
        again = publisher.publish({"l.0.w": torch.ones(2), "l.1.w": torch.ones(2)}, number=1)
        assert again.manifest == done.manifest
    return errors


def test_when_the_commit_is_refused_or_turns_out_a_retry_rank_0_takes_all_files_away(tmp_path: object) -> None:
    root = str(tmp_path)
    zero, one = returned(run_ranks(2, fail_at_commit, root))
    assert zero["commit"].message == one["commit"].message == "rank 0: may not"
    assert os.listdir(os.path.join(root, "data")) == [Channel.open(root).latest().folder.rpartition("/")[2]]


def come_without_the_last_rank(rank: int, root: str) -> dict[str, Caught]:
    errors: dict[str, Caught] = {}
    publisher = Publisher(root, timeout=2.0)
    if rank == 2:
        time.sleep(6.0)
        return errors
    with catching(errors, "publish"):
        publisher.publish({"w": torch.ones(2)})
    return errors


def test_case_60_a_rank_that_does_not_come_to_a_publish_is_named_within_the_configured_time(tmp_path: object) -> None:
    start = time.monotonic()
    zero, one, _ = returned(run_ranks(3, come_without_the_last_rank, str(tmp_path)))
    assert time.monotonic() - start < 60
    for errors in (zero, one):
        assert errors["publish"].kind == "RankTimeout"
        assert "no sign of life from rank 2" in errors["publish"].message


def record(rank: int, root: str) -> list[tuple[str, str]]:
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder)) as publisher:
        publisher.publish({"w": torch.ones(2)})
    return [change for change in recorder.seen if change[0] in CHANGES or rank]


def test_by_default_no_rank_but_0_asks_the_store_anything(tmp_path: object) -> None:
    assert returned(run_ranks(2, record, str(tmp_path)))[1] == []
