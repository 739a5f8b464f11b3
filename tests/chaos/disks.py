"""A small disk that runs full, and has room again: a tmpfs with a ballast file. Without the right to mount it is a
folder, and never full."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

MiB = 1 << 20


@dataclass(frozen=True)
class Disk:
    """`folder` is its root; `small` whether it can be filled."""

    folder: str
    small: bool

    def fill(self, but: int = 0) -> None:
        """So many bytes are left."""
        with open(self._ballast, "wb", buffering=0) as ballast:
            for size in (MiB, 4096, 1):
                with suppress(OSError):
                    self._write_on(ballast.fileno(), size)
            ballast.truncate(ballast.tell() - but)

    def free(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._ballast)

    @property
    def _ballast(self) -> str:
        return os.path.join(self.folder, ".ballast")

    def _write_on(self, file: int, size: int) -> None:
        while True:
            if os.write(file, bytes(size)) < size:
                raise OSError(errno.ENOSPC, "full")


@contextmanager
def disk(folder: str, size: int) -> Iterator[Disk]:
    os.makedirs(folder)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        yield Disk(folder, small=False)
        return
    try:
        yield Disk(folder, small=True)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True)
