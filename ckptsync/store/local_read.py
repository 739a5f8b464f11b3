"""Reading files of a LocalStore: several threads at once, O_DIRECT where it is aligned, stale handles
reopened."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

from ..errors import BadShard
from . import direct
from .retry import retrying
from .views import target


class OpenFile(NamedTuple):
    """Descriptors of one file, without and with O_DIRECT (None if that does not pay or is refused)."""

    fd: int
    direct_fd: int | None
    size: int


class LocalReader:
    """See Reader. Positional reads only, so threads share the descriptors."""

    def __init__(self, action: str, reopen: Callable[[], OpenFile], deadline: float) -> None:
        self._action = action
        self._reopen = reopen
        self._deadline = deadline
        self._lock = threading.Lock()
        # All that were opened: one that went stale may still be in use by another thread until close.
        self._descriptors: list[int] = []
        self._file = self._keep(retrying(action, reopen, deadline=deadline))

    @property
    def size(self) -> int:
        return self._file.size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """See Reader.readinto."""
        view = target(self._action, offset, buffer, self.size)
        done = retrying(self._action, lambda: self._read(offset, view), deadline=self._deadline)
        if done < len(view):
            raise BadShard(f"{self._action}: the file ends at byte {offset + done}, it had {self.size} when opened")

    def close(self) -> None:
        """Idempotent. Not while another thread is reading."""
        self._file = OpenFile(-1, None, self.size)  # a number that is closed may soon be another file's
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _keep(self, file: OpenFile) -> OpenFile:
        self._descriptors += [fd for fd in (file.fd, file.direct_fd) if fd is not None]
        return file

    def _read(self, offset: int, view: memoryview) -> int:
        file = self._file
        try:
            return direct.read_all(file.fd, file.direct_fd, offset, view)
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._replace(file)
            raise

    def _replace(self, stale: OpenFile) -> None:
        """NFS: the server forgot the handle; the name may still lead to the file. The caller tries again."""
        with self._lock:
            if self._file is stale:
                fresh = self._keep(self._reopen())
                if fresh.size != stale.size:
                    raise BadShard(f"{self._action}: {fresh.size} bytes now, {stale.size} when opened")
                self._file = fresh
