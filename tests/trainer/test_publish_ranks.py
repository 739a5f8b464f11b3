"""Publishing from real gloo ranks: one version for all, or one error for all."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.epochs import claimed
from ckptsync.errors import StoreFull
from ckptsync.shards.tensors import load_tensors
from ckptsync.store import open_store
from ckptsync.testing.hooks import Failing, HookedStore, matching
from tests.trainer.models import TinyModel, reference, same, shard
from tests.trainer.ranks_harness import Caught, catching, returned, run_ranks
from tests.waiting import until

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SECONDS = 15.0
"""What "within seconds" may mean on a busy machine; every deadline of the code is far longer."""


def unreachable(rank: int, root: str) -> object:
    """The root for rank 0; for the others a store that fails whatever is asked of it."""
    if rank == 0:
        return root
    return HookedStore(open_store(root), Failing(lambda: AssertionError("only rank 0 may look"), lambda *_: True))


def published(root: str, version: str = "latest") -> dict[str, torch.Tensor]:
    channel = Channel.open(root)
    manifest = channel.resolve(version)
    return dict(load_tensors(os.path.join(root, manifest.folder), manifest.tracks["model"], verify=True))


def publish_in_every_way(rank: int, root: str) -> list[object]:
    from ckptsync.publish import Publisher

    model = shard(TinyModel())
    done = []
    with Publisher(unreachable(rank, root), dtype=torch.bfloat16, run_id="run", shard_bytes=1500) as publisher:
        done.append(publisher.publish(model, step=1, metadata={"loss": 0.5}))
        done.append(publisher.publish(model.state_dict(), step=2))
        done.append(publisher.publish(iter(model.state_dict().items()), step=3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        done.append(publisher.publish(model, step=4))
    return [(d.version, d.nbytes, d.seconds, d.changed, d.content_digest, d.manifest.manifest_digest) for d in done]


def test_case_26_case_25_four_fsdp2_ranks_publish_one_version_each_time_and_only_rank_0_looks_at_the_store(
    tmp_path: object,
) -> None:
    """Also case 24: no rank but 0 touches any path, so none can be renamed twice."""
    root = str(tmp_path)
    facts = returned(run_ranks(4, publish_in_every_way, root))
    assert all(other == facts[0] for other in facts), "the same report on every rank"
    assert [str(fact[0]) for fact in facts[0]] == ["e1-v1", "e1-v2", "e1-v3", "e1-v4"]
    assert [fact[3] for fact in facts[0]] == [True, False, False, True]

    expected = reference(TinyModel(), torch.bfloat16)
    same(published(root, "1"), expected)
    same(published(root, "2"), expected)
    same(published(root, "3"), expected)
    channel = Channel.open(root)
    first, third = channel.resolve("1"), channel.resolve("3")
    assert first.step == 1
    assert first.metadata == {"loss": 0.5}
    assert first.producer["world_size"] == 4
    shards = [file.name for file in first.tracks["model"].files if file.name.endswith(".safetensors")]
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert third.tracks["model"].files[0].name == "model-00001.safetensors", "a stream does not know how many"


# -- failures ------------------------------------------------------------------------------------------------


def failing_source(rank: int, bad: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(20):
        if number == 10 and rank == bad:
            raise RuntimeError("the loader broke")
        yield f"t{number}", torch.full((64,), float(number))


def lockstep_source(rank: int, bad: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A source that gathers by itself: when one rank fails the others are stuck inside it."""
    import torch.distributed as dist

    group = dist.new_group()
    for number in range(4):
        if number == 2 and rank == bad:
            raise RuntimeError("the loader broke")
        tensor = torch.full((64,), float(rank))
        dist.all_reduce(tensor, group=group)
        yield f"t{number}", tensor


def fail_and_go_on(rank: int, root: str) -> dict[str, object]:
    from ckptsync.publish import Publisher

    errors: dict[str, Caught] = {}
    full = Failing(
        lambda: StoreFull("no space left on device"), matching("append", suffix="00002.safetensors"), times=1
    )
    root_store = HookedStore(open_store(root), full) if rank == 0 else root
    good = shard(TinyModel(blocks=4))
    started = time.time()
    with Publisher(root_store, bucket_bytes=512, shard_bytes=1500, timeout=60) as publisher:
        with catching(errors, "store full"):
            publisher.publish(iter(good.state_dict().items()))
        with catching(errors, "source"):
            publisher.publish(failing_source(rank, bad=1))
        with catching(errors, "keys"):
            publisher.publish({f"t{n}": torch.ones(2) for n in range(3 + (rank == 1))})
        with catching(errors, "shapes"):
            publisher.publish({"t": torch.ones(2 + rank)})
        with catching(errors, "stream of other names"):
            publisher.publish(iter([("a", torch.ones(2)), (f"b{rank}", torch.ones(2))]))
        with catching(errors, "meta"):
            publisher.publish({"a": torch.ones(2), "b": torch.ones(2, device="meta" if rank else "cpu")})
        with catching(errors, "interrupt"):
            publisher.publish(interrupted(rank))
        elapsed = time.time() - started
        last = publisher.publish(good)
        with catching(errors, "lockstep"):
            publisher.publish(lockstep_source(rank, bad=1))
    return {"errors": errors, "elapsed": elapsed, "last": last.version}


def interrupted(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(2)
    if rank == 0:
        raise KeyboardInterrupt


def test_case_60_a_failure_on_one_rank_raises_on_all_and_the_next_publish_works(tmp_path: object) -> None:
    root = str(tmp_path)
    facts = returned(run_ranks(2, fail_and_go_on, root))
    zero, one = (fact["errors"] for fact in facts)

    assert all(fact["elapsed"] < 2 * SECONDS for fact in facts), "seven failures"
    for errors in (zero, one):
        assert errors["store full"].message == "rank 0: no space left on device"
        assert errors["source"].message == "rank 1: RuntimeError: the loader broke"
        assert errors["lockstep"].message == "rank 1: RuntimeError: the loader broke"
        assert {errors[name].kind for name in ("store full", "source", "lockstep")} == {"RankFailed"}
        assert errors["keys"].kind == errors["shapes"].kind == "RanksDisagree"
        assert "at 3, rank 0 has nothing, rank 1 has 't3' F32[2]" in errors["keys"].message
        assert "rank 0 has 't' F32[2], rank 1 has 't' F32[3]" in errors["shapes"].message
        assert "'b0' F32[2], rank 1 has 'b1' F32[2]" in errors["stream of other names"].message
        assert errors["meta"].kind == "UnsupportedTensor"
        assert "rank 1: tensor 'b'" in errors["meta"].message
    assert zero["store full"].cause == "StoreFull"
    assert one["source"].cause == "RuntimeError"
    assert zero["interrupt"].kind == "KeyboardInterrupt"
    assert one["interrupt"].kind == "RankFailed"
    assert "rank 0: KeyboardInterrupt" in one["interrupt"].message

    channel = Channel.open(root)
    assert [str(version) for version in channel.committed()] == ["e1-v1"], "only the good one was committed"
    assert facts[0]["last"] == channel.latest().id
    same(published(root), reference(TinyModel(blocks=4)))
    assert len(os.listdir(os.path.join(root, "data"))) == 1, "the failed attempts took their files away"


def publish_slowly(rank: int, root: str) -> object:
    from ckptsync.publish import Publisher

    def slow(operation: str, path: str) -> None:
        if operation == "commit" and path.endswith("00001-of-00002.safetensors"):
            time.sleep(5.0)

    store = HookedStore(open_store(root), slow) if rank == 0 else root
    model = shard(TinyModel(blocks=4))
    with Publisher(store, bucket_bytes=512, shard_bytes=4000) as publisher:
        return publisher.publish(model).version


def test_case_61_storage_slower_than_the_timeout_of_the_jobs_own_collectives_does_no_harm(
    tmp_path: object,
) -> None:
    done = returned(run_ranks(2, publish_slowly, str(tmp_path), collective_timeout=2.0))
    assert [str(version) for version in done] == ["e1-v1", "e1-v1"]


def publish_until_killed(rank: int, root: str, victim: int) -> None:
    from ckptsync.publish import Publisher

    model = shard(TinyModel())
    publisher = Publisher(root, bucket_bytes=512, timeout=120)
    publisher.publish(model)
    from ckptsync.export import stream

    collect, count = stream.collect, iter(range(100))

    def killing(*args: object) -> Iterator[object]:
        if next(count) == 5 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from collect(*args)

    stream.collect = killing
    publisher.publish(model)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_killed_in_the_middle_of_a_publish_raises_on_the_others_within_seconds(
    tmp_path: object, victim: int
) -> None:
    root = str(tmp_path)
    start = time.time()
    outcomes = run_ranks(4, publish_until_killed, root, victim)
    assert outcomes[victim].killed
    errors = [outcome.error for outcome in outcomes if outcome.rank != victim]
    assert all(errors), outcomes
    assert {error.kind for error in errors} == {"RankTimeout"}, [error.trace for error in errors]
    assert max(error.at for error in errors) - min(error.at for error in errors) < SECONDS
    assert time.time() - start < 60
    if victim:
        assert all(f"no sign of life from rank {victim}" in error.message for error in errors), errors
    assert [str(version) for version in Channel.open(root).committed()] == ["e1-v1"]


def come_late(rank: int) -> dict[str, Caught]:
    from ckptsync.ranks import Ranks

    errors: dict[str, Caught] = {}
    ranks = Ranks(timeout=2.0)
    if rank == 2:
        time.sleep(6.0)
    with catching(errors, "late"):
        ranks.agree()
    with catching(errors, "after"):
        ranks.agree()
    return errors


def test_a_rank_that_does_not_come_is_named_and_the_job_is_told_to_restart() -> None:
    errors = returned(run_ranks(4, come_late))
    for rank in (0, 1, 3):
        assert errors[rank]["late"].kind == "RankTimeout"
        assert "no sign of life from rank 2" in errors[rank]["late"].message
        assert "waited 2 s for the consensus of all ranks" in errors[rank]["late"].message
    assert {errors[rank]["after"].kind for rank in range(4)} == {"RankTimeout"}


def exchange(rank: int) -> list[object]:
    from ckptsync.errors import Fenced
    from ckptsync.ranks import Ranks

    errors: dict[str, Caught] = {}
    ranks = Ranks(timeout=30)
    ranks.agree()
    values = [ranks.broadcast(f"from {rank}"), ranks.gather(rank * rank)]
    ranks.same(["a", "b"], "letters")
    with catching(errors, "typed"):
        ranks.agree(Fenced("a newer epoch") if rank == 0 else None)
    with catching(errors, "two fail"), ranks.together():
        if rank:
            raise OSError(errno.EIO, f"disk of rank {rank}")
        ranks.broadcast("never arrives")
    with catching(errors, "cause"), ranks.together():
        raise ValueError(f"I am {rank}") if rank == 1 else KeyError(rank)
    values.append(ranks.gather("still in step"))
    ranks.close()
    ranks.close()
    return [values, errors]


def test_ranks_exchange_values_and_one_common_error() -> None:
    (values, zero), (others, one), (_, two) = returned(run_ranks(3, exchange))
    assert values == others == ["from 0", [0, 1, 4], ["still in step"] * 3]
    assert zero["typed"].kind == one["typed"].kind == "Fenced"
    assert zero["typed"].message == one["typed"].message == "rank 0: a newer epoch"
    for errors in (zero, one, two):
        assert errors["two fail"].message == "rank 1: OSError: [Errno 5] disk of rank 1", "the first failing rank"
        assert errors["cause"].message == "rank 0: KeyError: 0"
    assert (zero["two fail"].cause, two["two fail"].cause) == ("", "OSError")
    assert one["cause"].cause == "ValueError"


def publish_alone(rank: int, root: str) -> dict[str, object]:
    """A job of its own: `local_rank == 0` is true once per node."""
    import torch.distributed as dist

    from ckptsync.publish import Publisher

    dist.barrier()
    dist.destroy_process_group()
    errors: dict[str, Caught] = {}
    with Publisher(root, run_id=f"job {rank}") as publisher, catching(errors, "publish"):
        until(lambda: len(claimed(open_store(root))) == 2, what="both have claimed an epoch")
        for _ in range(5):
            publisher.publish({"w": torch.full((4,), float(rank))})
    return {"epoch": publisher.epoch, "errors": errors}


def test_case_46_of_two_jobs_started_at_once_the_older_epoch_is_fenced(tmp_path: object) -> None:
    facts = returned(run_ranks(2, publish_alone, str(tmp_path)))
    assert sorted(fact["epoch"] for fact in facts) == [1, 2]
    older, newer = sorted(facts, key=lambda fact: fact["epoch"])
    assert newer["errors"] == {}
    assert older["errors"]["publish"].kind == "Fenced"
    channel = Channel.open(str(tmp_path))
    assert channel.latest().epoch == 2
    assert [str(version) for version in channel.committed()] == [f"e2-v{n}" for n in range(1, 6)]
