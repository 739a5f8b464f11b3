"""A folder changed in place is the old version, the new one, or says that it is neither; a second call ends it."""

from __future__ import annotations

import os
import signal
from functools import partial

import msgspec
import pytest
import torch

from ckptsync import Channel
from ckptsync.copies import export_version, read_export
from ckptsync.delta import inplace
from ckptsync.delta.codec import encode
from ckptsync.errors import BadManifest, BadShard, BrokenChain, InvalidInput
from ckptsync.layout import SELF_COPY
from ckptsync.shards.tensors import load_tensors
from ckptsync.version import VersionId

from .test_versions import Trainer, damage, delta_file, same

BLOCK = 1024
"""Elements of a block here: every tensor that changes has two or three, the last one shorter or whole."""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptsync.delta.baseline.encode", partial(encode, block=BLOCK))
    trainer = Trainer(str(tmp_path / "root"), skip=())
    generator = torch.Generator().manual_seed(3)
    trainer.state |= {
        f"layers.{n}.extra": torch.randn(40, 32, generator=generator).to(torch.bfloat16) for n in range(2, 5)
    }
    return trainer


@pytest.fixture
def folder(tmp_path, trainer):
    """Version 1 of three, exported."""
    for _ in range(3):
        for name in list(trainer.state)[-3:]:
            trainer.state[name] = (trainer.state[name].view(torch.int16) + 1).view(torch.bfloat16)
        trainer.publish()
    folder = str(tmp_path / "out")
    channel = Channel.open(trainer.root)
    export_version(channel, channel.manifest(VersionId(1, 1)), folder)
    return folder


def held(folder: str) -> dict[str, torch.Tensor]:
    manifest = read_export(folder)
    return dict(load_tensors(folder, manifest.tracks["model"], verify=True))


def test_a_folder_goes_over_several_deltas_to_the_target(trainer, folder):
    channel = Channel.open(trainer.root)
    inplace.advance(channel, folder, channel.latest())
    assert read_export(folder).id == VersionId(1, 3)
    assert same(held(folder), trainer.state)
    assert sorted(os.listdir(folder)) == sorted([SELF_COPY, *(name for name, _ in channel.latest().files())])


def killed_at(point: int, work) -> bool:
    """Run `work` in a process of its own that dies by SIGKILL in the middle of its `point`-th write; whether it did."""
    return was_killed(killed_later(point, work))


def was_killed(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def killed_later(point: int, work) -> int:
    """The process that does the same meanwhile."""
    if pid := os.fork():
        return pid
    writes, pwrite, replace = [0], os.pwrite, os.replace

    def step() -> bool:
        writes[0] += 1
        return writes[0] == point

    def torn(handle, data, offset):
        if step():
            pwrite(handle, bytes(data)[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(handle, data, offset)

    def before(source, target):
        if step():
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    try:
        os.pwrite, os.replace = torn, before
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_kill_9_at_every_write_leaves_a_folder_that_the_next_call_completes(trainer, folder, tmp_path):
    channel = Channel.open(trainer.root)
    first, last = channel.manifest(VersionId(1, 1)), channel.latest()
    inplace.advance(channel, folder, last)  # compiles the kernels before the forks
    for point in range(1, 100):
        again = str(tmp_path / f"out-{point}")
        export_version(channel, first, again)
        if not killed_at(point, lambda folder=again: inplace.advance(channel, folder, last)):
            break
        if os.path.exists(os.path.join(again, SELF_COPY)):
            version = read_export(again).id
            assert same(held(again), trainer.held[version]), "what says that it is a version is one"
        inplace.advance(channel, again, last)
        assert same(held(again), trainer.state)
    assert point > 2 * (3 + 3 + 2 + 2 + 2), "two writes for each block of five tensors, and more"


@pytest.mark.parametrize("point", [3, 12, 1000])
def test_two_processes_that_bring_one_folder_forward_end_right_also_if_one_is_killed(point, trainer, folder):
    channel = Channel.open(trainer.root)
    last = channel.latest()
    both = [killed_later(each, lambda: inplace.advance(channel, folder, last)) for each in (point, 1000)]
    assert not was_killed(both[1])
    was_killed(both[0])  # or not: the other one may have done it all before
    assert read_export(folder).id == last.id
    assert same(held(folder), trainer.state)


def test_a_damaged_delta_is_found_before_the_folder_is_touched(trainer, folder):
    channel = Channel.open(trainer.root)
    damaged = delta_file(channel.manifest(VersionId(1, 3)))
    damage(trainer.root, damaged)
    with pytest.raises(BrokenChain, match=f"e1-v3 against e1-v2: {damaged}"):
        inplace.advance(channel, folder, channel.latest())
    assert same(held(folder), trainer.held[VersionId(1, 1)])


def test_a_block_that_is_neither_is_fetched_again(trainer, folder):
    channel = Channel.open(trainer.root)
    shard = next(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    with open(os.path.join(folder, shard), "r+b") as file:
        file.seek(5000)
        file.write(b"rot")
    inplace.advance(channel, folder, channel.latest())
    assert same(held(folder), trainer.state)


def truncated(path: str) -> None:
    os.truncate(path, os.path.getsize(path) - 100)


def without_a_header(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(8)
        file.write(b"rot")


@pytest.mark.parametrize("harm", [truncated, without_a_header, os.remove])
def test_a_folder_with_a_shard_of_another_layout_is_refused_before_it_is_touched(harm, trainer, folder):
    channel, before = Channel.open(trainer.root), set(os.listdir(folder))
    shard = next(name for name in before if name.endswith(".safetensors"))
    harm(os.path.join(folder, shard))
    with pytest.raises(BadShard, match=rf"cannot become e1-v3: .*{shard}.*; export it into a new folder"):
        inplace.advance(channel, folder, channel.latest())
    assert set(os.listdir(folder)) | {shard} == before


def test_what_came_out_wrong_is_refused_with_a_remedy(trainer, folder):
    shard = os.path.join(folder, next(name for name in os.listdir(folder) if name.endswith(".safetensors")))
    rotten(shard)
    channel = Channel.open(trainer.root)
    with pytest.raises(BadShard, match=r"did not become e1-v3: .*; export it into a new folder"):
        inplace.advance(channel, folder, channel.latest())


def rotten(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"rot")


@pytest.mark.parametrize("damage", [rotten, os.remove])
def test_a_folder_that_holds_the_target_already_is_proven_all_the_same(damage, trainer, folder):
    channel = Channel.open(trainer.root)
    first = channel.manifest(VersionId(1, 1))
    inplace.advance(channel, folder, first)
    damage(os.path.join(folder, next(name for name in os.listdir(folder) if name.endswith(".safetensors"))))
    with pytest.raises(BadShard, match="is not the e1-v1 that it says"):
        inplace.advance(channel, folder, first)


def test_no_way_there_is_said_and_changes_nothing(trainer, folder):
    channel = Channel.open(trainer.root)
    inplace.advance(channel, folder, channel.latest())
    with pytest.raises(InvalidInput, match="no deltas lead from e1-v3"):
        inplace.advance(channel, folder, channel.manifest(VersionId(1, 2)))
    assert same(held(folder), trainer.state)


def test_an_adapter_is_made_from_nothing_and_its_chain_is_not_called_broken(trainer, folder):
    channel = Channel.open(trainer.root)
    adapter = msgspec.structs.replace(channel.latest(), kind="adapter", number=9, parent=None)
    with pytest.raises(InvalidInput, match=r"no deltas lead from e1-v1 .* to e1-v9"):
        inplace.advance(channel, folder, adapter)
    assert os.path.exists(os.path.join(folder, SELF_COPY))


def test_a_folder_that_holds_no_version_is_refused(tmp_path, trainer, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    channel = Channel.open(trainer.root)
    with pytest.raises(BadManifest, match="holds no exported version"):
        inplace.advance(channel, str(empty), channel.latest())
