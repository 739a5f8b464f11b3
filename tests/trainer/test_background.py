"""A publish that goes on while the training does: what is in it, how it fails, and how it ends with the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.delta.policy import DeltaPolicy
from ckptsync.errors import Busy, InvalidInput, StoreFull
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.testing.hooks import Failing, HookedStore, matching
from ckptsync.verify import verify_version
from tests.trainer.models import TinyModel, reference, same, shard
from tests.trainer.ranks_harness import Caught, catching, clean_processes, returned, run_ranks
from tests.trainer.test_sources import loaded


class Gate:
    """Hook: holds the first shard's writer until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, operation: str, path: str) -> None:
        if operation == "append" and path.endswith(".safetensors"):
            self.reached.set()
            assert self.opened.wait(60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def test_case_10_the_version_is_the_state_at_the_call_whatever_the_training_does_meanwhile(
    root: str, gate: Gate
) -> None:
    model = TinyModel()
    before = reference(model)
    metadata = {"loss": [1.0]}
    with Publisher(HookedStore(open_store(root), gate)) as publisher:
        pending = publisher.publish(model, step=7, metadata=metadata, background=True)
        assert gate.reached.wait(30)
        assert not pending.done()
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.01)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(1.0)
        metadata["loss"][0] = 2.0
        gate.opened.set()
        done = pending.result()
    same(loaded(root, done.manifest), before)
    assert done.manifest.step == 7
    assert done.manifest.metadata == {"loss": [1.0]}
    assert set(done.seconds) == {"snapshot", "gather", "write", "commit"}


def test_case_9_versions_through_the_same_buffer_differ_as_the_weights_do(root: str) -> None:
    model = TinyModel()
    with Publisher(root) as publisher:
        for step in range(4):
            if step != 2:
                with torch.no_grad():
                    model.embed.weight += 1
            done = publisher.publish(model, step=step, background=True).result()
            assert done.changed == (step != 2)
            same(loaded(root, done.manifest), reference(model))


def test_case_5_readers_see_the_version_before_until_the_new_one_is_complete(root: str, gate: Gate) -> None:
    gate.opened.set()
    with Publisher(HookedStore(open_store(root), gate)) as publisher:
        publisher.publish({"w": torch.ones(2)})
        gate.opened.clear()
        gate.reached.clear()
        pending = publisher.publish({"w": torch.zeros(2)}, background=True)
        assert gate.reached.wait(30)
        assert Channel.open(root).latest().number == 1
        gate.opened.set()
        assert pending.result().version == Channel.open(root).latest().id


def test_case_8_a_failure_comes_out_of_result_and_of_the_next_publish(root: str) -> None:
    full = Failing(lambda: StoreFull("no space left"), matching("append", suffix="00001-of-00001.safetensors"), times=2)
    state = {"w": torch.ones(2)}
    with Publisher(HookedStore(open_store(root), full)) as publisher:
        publisher.publish(state, background=True)
        with pytest.raises(StoreFull, match="no space left"):
            publisher.publish(state)
        assert Channel.open(root).committed() == []
        pending = publisher.publish(state, background=True)
        with pytest.raises(StoreFull):
            pending.result()
        assert publisher.publish(state).version.number == 1, "what result() has raised is not raised again"
    assert len(os.listdir(os.path.join(root, "data"))) == 1, "the failed attempts took their files away"


def test_one_at_a_time_the_next_waits_is_skipped_or_refused(root: str, gate: Gate) -> None:
    def publisher(**settings: str) -> Publisher:
        return Publisher(HookedStore(open_store(root), gate), **settings)

    first, second = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    with publisher(pending="skip") as skipping:
        pending = skipping.publish(first, background=True)
        skipped = skipping.publish(second, background=True)
        assert skipped.skipped
        assert skipped.done()
        with pytest.raises(Busy, match="skipped"):
            skipped.result()
        gate.opened.set()
        assert pending.result().version.label == "e1-v1"
        assert skipping.publish(second, background=True).result().version.label == "e1-v2"
    gate.opened.clear()
    with publisher(pending="error") as refusing:
        pending = refusing.publish(first, background=True)
        with pytest.raises(Busy):
            refusing.publish(second, background=True)
        gate.opened.set()
        pending.result()
    gate.opened.clear()
    with publisher() as waiting:
        waiting.publish(first, background=True)
        threading.Timer(0.3, gate.opened.set).start()
        assert waiting.publish(second).version.label == "e3-v5", "the foreground waits as well"


def test_close_waits_for_the_pending_version(root: str) -> None:
    with Publisher(root) as publisher:
        publisher.publish({"w": torch.ones(1 << 20)}, background=True)
    assert Channel.open(root).latest().number == 1


def test_what_is_wrong_with_the_call_is_raised_by_the_call(root: str) -> None:
    with Publisher(root) as publisher:
        with pytest.raises(InvalidInput):
            publisher.publish({}, background=True)
        with pytest.raises(InvalidInput):
            publisher.publish({"w": torch.ones(1)}, step="1", background=True)
        assert publisher.publish({"w": torch.ones(1)}, background=True).result().version.number == 1


# -- the process ends ----------------------------------------------------------------------------------------


def slow_store(root: str, seconds: float) -> HookedStore:
    def slow(operation: str, path: str) -> None:
        if operation == "append" and path.endswith(".safetensors"):
            time.sleep(seconds)

    return HookedStore(open_store(root), slow)


def state(count: int = 8) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.w": torch.full((1 << 16,), float(n)) for n in range(count)}


def leave_at_once(root: str, seconds: float, exit_seconds: float) -> None:
    publisher = Publisher(slow_store(root, seconds), exit_seconds=exit_seconds)
    publisher.publish({"w": torch.ones(2)})
    publisher.publish(state(), background=True)


def wait_for_sigterm(root: str, seconds: float, exit_seconds: float, ready: Any) -> None:
    leave_at_once(root, seconds, exit_seconds)
    ready.set()
    while True:
        time.sleep(0.05)


def run_script(body: Callable[..., None], *args: object) -> int:
    """In an interpreter of its own, since a forked process leaves without the interpreter's exit."""
    import subprocess

    code = f"from tests.trainer.test_background import {body.__name__} as body; body(*{args!r})"
    return subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode


def check(root: str, newest: int, kept: int) -> None:
    channel = Channel.open(root)
    assert channel.latest().number == newest
    for version in channel.committed():
        assert verify_version(channel, version).ok
    assert len(os.listdir(os.path.join(root, "data"))) == kept, "no debris"


@pytest.mark.slow
def test_interpreter_exit_finishes_the_pending_version(root: str) -> None:
    assert run_script(leave_at_once, root, 0.1, 30.0) == 0
    check(root, newest=2, kept=2)


@pytest.mark.slow
def test_interpreter_exit_drops_a_version_that_takes_too_long_and_its_files(root: str) -> None:
    assert run_script(leave_at_once, root, 0.8, 0.5) == 0
    check(root, newest=1, kept=1)


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "exit_seconds", "newest"), [(0.1, 30.0, 2), (0.8, 0.5, 1)], ids=["finish", "drop"])
def test_sigterm_finishes_the_pending_version_or_drops_it_and_then_ends_the_process(
    seconds: float, exit_seconds: float, newest: int, root: str
) -> None:
    context = clean_processes()
    ready = context.Event()
    process = context.Process(target=wait_for_sigterm, args=(root, seconds, exit_seconds, ready))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == -signal.SIGTERM
    check(root, newest=newest, kept=newest)


def test_a_handler_of_the_trainers_own_for_sigterm_is_left_alone(root: str) -> None:
    def own(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with Publisher(root) as publisher:
            publisher.publish({"w": torch.ones(2)}, background=True).result()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


# -- with other ranks ----------------------------------------------------------------------------------------


def train_meanwhile(rank: int, root: str, writers: str) -> dict[str, Any]:
    import torch.distributed as dist

    model = shard(TinyModel(blocks=6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending, steps_meanwhile = None, 0
    with Publisher(slow_store(root, 0.05), writers=writers, bucket_bytes=1024, shard_bytes=4000) as publisher:
        expected = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
        expected = {name: tensor.clone() for name, tensor in expected.items()}
        pending = publisher.publish(model, step=0, background=True)
        while True:
            model(torch.arange(16)).sum().backward()  # collectives of the job's own group, all the while
            optimizer.step()
            optimizer.zero_grad()
            steps_meanwhile += 1
            done = torch.tensor([int(pending.done())])
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done.item():
                break
        version = pending.result().manifest
    if rank == 0:
        same(loaded(root, version), expected)
    return {"steps": steps_meanwhile, "digest": version.content_digest}


def hold_a_partial_sum(rank: int, root: str) -> dict[str, Caught]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    errors: dict[str, Caught] = {}
    tensor = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Partial()])
    with Publisher(root) as publisher, catching(errors, "publish"):
        publisher.publish({"sum": tensor}, background=True)
    return errors


@pytest.mark.distributed
@pytest.mark.slow
def test_what_only_a_collective_can_put_together_is_refused_by_name_in_the_background(tmp_path: Path) -> None:
    for errors in returned(run_ranks(2, hold_a_partial_sum, str(tmp_path))):
        assert errors["publish"].kind == "UnsupportedTensor"
        assert "'sum' is a partial sum" in errors["publish"].message


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("writers", ["rank0", "all"])
def test_case_10_four_ranks_go_on_training_over_their_own_group_meanwhile(tmp_path: Path, writers: str) -> None:
    facts = returned(run_ranks(4, train_meanwhile, str(tmp_path), writers))
    assert all(fact == facts[0] for fact in facts)
    assert facts[0]["steps"] > 3


def fail_in_the_background(rank: int, root: str) -> dict[str, Caught]:
    errors: dict[str, Caught] = {}
    full = Failing(lambda: StoreFull("no space left"), matching("append", suffix="00002.safetensors"), times=1)
    store = HookedStore(open_store(root), full) if rank == 0 else root
    model = shard(TinyModel(blocks=4))
    with Publisher(store, shard_bytes=4000) as publisher:
        pending = publisher.publish(model, background=True)
        if rank == 0:
            with catching(errors, "result"):
                pending.result()
        with catching(errors, "next"):
            publisher.publish(model)
        publisher.publish(model)
    return errors


@pytest.mark.distributed
@pytest.mark.slow
def test_case_8_a_failure_on_rank_0_is_raised_by_the_next_publish_of_every_rank(tmp_path: Path) -> None:
    zero, one = returned(run_ranks(2, fail_in_the_background, str(tmp_path)))
    assert zero["result"].message == zero["next"].message == one["next"].message == "rank 0: no space left"
    assert [str(version) for version in Channel.open(str(tmp_path)).committed()] == ["e1-v1"]


def test_a_second_thread_is_refused_while_a_publish_is_under_way(root: str) -> None:
    refused: list[BaseException] = []

    def meanwhile(_: int) -> None:
        def publish() -> None:
            try:
                publisher.publish({"w": torch.full((4,), 7.0)})
            except Busy as error:
                refused.append(error)

        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()

    with Publisher(root, delta=DeltaPolicy()) as publisher:
        assert str(publisher.publish({"w": torch.zeros(4)}, progress=meanwhile).version) == "e1-v1"
        assert refused
        assert "one call at a time" in str(refused[0])
        assert str(publisher.publish({"w": torch.ones(4)}).version) == "e1-v2"
