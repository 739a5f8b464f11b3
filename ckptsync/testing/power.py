"""A disk whose power can be cut: an ext4 file system of its own, in a file, over a loop device. Needs root, on Linux.

    with Disk(folder) as disk:
        write(disk.root)
        cut(disk.root)            # from any process; whatever comes after it is EIO
        disk.restart()            # the journal is replayed
        check(disk.root)          # what was not fsynced is gone

The cut is the file system's own shutdown without a flush of its journal, `EXT4_IOC_SHUTDOWN`, as xfstests cuts the
power: https://git.kernel.org/pub/scm/fs/xfs/xfstests-dev.git/tree/src/godown.c. What the page cache holds is dropped.
The disk below is taken to keep what it has taken: it has no cache of its own that could be lost.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from types import TracebackType
from typing import Self

from ..errors import StoreError

_SHUTDOWN = 2 << 30 | 4 << 16 | ord("X") << 8 | 125
"""_IOR('X', 125, __u32), of linux/fs/ext4/ioctl.c."""

_WITHOUT_LOG = 2
"""EXT4_GOING_FLAGS_NOLOGFLUSH."""


def can_cut() -> bool:
    """Whether this process may mount a file system over a loop device."""
    return os.geteuid() == 0 and os.access("/dev/loop-control", os.R_OK | os.W_OK)


def cut(root: str) -> None:
    """Cut the power of the disk at `root`, now. Every later operation on it fails with EIO until it is restarted."""
    folder = os.open(root, os.O_RDONLY)
    try:
        fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
    finally:
        os.close(folder)


class Disk:
    """Mounted at `folder`/disk until it is closed. StoreError, with what mount said, where that is not possible."""

    def __init__(self, folder: str, *, nbytes: int = 128 << 20) -> None:
        self._image, self.root = os.path.join(folder, "image"), os.path.join(folder, "disk")
        os.makedirs(self.root)
        with open(self._image, "wb") as image:
            image.truncate(nbytes)
        _do("mkfs.ext4", "-q", self._image)
        self._mount()

    def restart(self) -> None:
        """Power on again, with the bytes that the disk had then."""
        # Of a copy: a mount namespace that somebody made meanwhile (`ip netns exec` does) keeps the dead one mounted.
        copy = f"{self._image}.copy"
        _do("cp", "--sparse=always", self._image, copy)
        self.close()
        os.replace(copy, self._image)
        self._mount()

    def close(self) -> None:
        _do("umount", "--lazy", self.root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _mount(self) -> None:
        # The journal is not written out by itself every 5 s: what is there after a cut was asked for.
        _do("mount", "-o", "loop,commit=300", self._image, self.root)


def _do(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise StoreError(f"{command[0]} is not installed: a disk needs e2fsprogs and mount") from error
    except subprocess.CalledProcessError as error:
        raise StoreError(f"{' '.join(command)}: {error.stderr.strip()}") from error
