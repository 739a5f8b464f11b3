"""Faults from the field that cut across the parts, by their case numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.testing.hooks import HookedStore, Recorder
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from watchers.stage import Stage


def weights(seed: int = 0, size: int = 1 << 20) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.w": torch.randn(size, generator=generator).bfloat16() for i in range(4)}


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


def test_case_4_a_half_written_folder_of_another_world_size_is_never_mixed_in(root, tmp_path):
    with Publisher(root) as publisher:
        publisher.publish(weights(1))
    left = os.path.join(root, "data", "e0001-v00000002-dead")
    os.makedirs(left)
    for rank in range(4):
        with open(os.path.join(left, f"model-0000{rank + 1}-of-00004.safetensors"), "wb") as file:
            file.write(b"half a shard")
    with Publisher(root) as publisher:
        done = publisher.publish(weights(2))
    channel = Channel.open(root)
    assert verify_version(channel, done.version).ok
    staged = Stage(str(tmp_path / "stage")).stage(channel, channel.latest())
    listed = {name for name, _ in done.manifest.files()} | {"ckptsync.json"}
    assert set(os.listdir(staged.folder)) == listed
    assert os.listdir(left), "another attempt's files are swept later, not by whoever comes by"


def test_case_36_files_are_read_in_order_and_in_megabytes(root, tmp_path):
    with Publisher(root) as publisher:
        done = publisher.publish(weights(size=8 << 20))
    reads: list[tuple[str, int, int]] = []
    channel = Channel.open(_LoggingStore(open_store(root), reads))
    Stage(str(tmp_path / "stage")).stage(channel, channel.latest())
    assert verify_version(channel, done.version).ok
    shards = [read for read in reads if read[0].endswith(".safetensors")]
    sizes = [size for _, _, size in shards if size > 1 << 16]
    assert sum(sizes) >= 2 * 64 << 20, "staged once and verified once"
    assert len(sizes) <= 2 * (64 // 8 + 2), "no page by page"


class _LoggingStore(HookedStore):
    """Remembers (path, offset, bytes) of every read."""

    def __init__(self, inner, reads):
        super().__init__(inner, lambda *_: None)
        self.reads = reads

    def open(self, path):
        return _LoggingReader(self.inner.open(path), path, self.reads)


class _LoggingReader:
    def __init__(self, inner, path, reads):
        self.inner, self.path, self.reads = inner, path, reads
        self.size = inner.size

    def readinto(self, offset, buffer):
        self.reads.append((self.path, offset, len(buffer)))
        self.inner.readinto(offset, buffer)

    def close(self):
        self.inner.close()


@pytest.mark.slow
def test_case_37_verifying_takes_the_same_memory_whatever_the_size(root):
    with Publisher(root) as publisher:
        publisher.publish(weights(size=4 << 20))
        publisher.publish(weights(size=64 << 20))
    script = textwrap.dedent("""
        import resource, sys
        from ckptsync.channel import Channel
        from ckptsync.verify import verify_version
        channel = Channel.open(sys.argv[1])
        assert verify_version(channel, channel.resolve(sys.argv[2]).id).ok
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    """)
    peak = [int(subprocess.check_output([sys.executable, "-c", script, root, number])) for number in ("1", "2")]
    assert peak[1] - peak[0] < 64, f"32 MB took {peak[0]} MiB, 512 MB took {peak[1]} MiB"


def test_case_48_there_is_no_lock_file_in_the_protocol(root):
    recorder = Recorder()
    with Publisher(HookedStore(open_store(root), recorder)) as publisher:
        publisher.publish(weights())
    made = {path for operation, path in recorder.seen if operation in ("write", "create")}
    assert not [path for path in made if "lock" in path]
    assert not [name for _, _, names in os.walk(root) for name in names if "lock" in name]


@pytest.mark.parametrize("ahead", [-1e6, 1e6], ids=["clock slow", "clock fast"])
def test_case_50_neither_clock_nor_mtime_decides_what_is_newest(root, monkeypatch, ahead):
    with Publisher(root) as publisher:
        publisher.publish(weights(1))
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + ahead)
    with Publisher(root) as publisher:
        publisher.publish(weights(2))
    for folder, _, names in os.walk(root):
        for name in names:
            os.utime(os.path.join(folder, name), (0, 0) if "v00000002" in folder + name else (2e9, 2e9))
    assert Channel.open(root).latest().id == VersionId(2, 2)
