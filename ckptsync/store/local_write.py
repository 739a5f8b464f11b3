"""Writing files of a LocalStore: temporary name, O_DIRECT, fsync, then rename or link, then fsync of the folder.

Bytes go through aligned buffers that worker threads write, since a tensor seldom lies where O_DIRECT wants it. Large
pieces that do lie there, at a block boundary of the file too, are written from where they are, without a copy; into
memory (tmpfs) all large pieces are.
"""

from __future__ import annotations

import contextlib
import errno
import os

from ..digest import Bytes
from . import direct
from .pipeline import Pipeline
from .retry import translated
from .views import flat

NO_COPY = 1 << 20
"""Bytes from which a piece is worth a write of its own."""

# What link() says where the file system has no hard links (FAT, some FUSE) or the file has too many.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)


class LocalWriter:
    """See Writer. Full chunks go out with O_DIRECT from aligned buffers, the tail through the page cache."""

    def __init__(self, action: str, folder: int, temporary: str, name: str, fd: int, *, direct_io: bool) -> None:
        self._action = action
        self._folder = folder
        self._temporary = temporary
        self._name = name
        self._fd = fd
        self._in_memory = direct.in_memory(fd)
        self._direct = direct_io and not self._in_memory and direct.switch(fd, True)
        self._pipeline = self._buffers()
        self._begin = self._size = 0
        """Where in the file the pipeline's first byte lies, and how many bytes were taken in all."""

    def write(self, data: Bytes) -> None:
        """See Writer.write. StoreFull names a used-up quota as such."""
        translated(self._action, lambda: self._write(flat(data)))

    def commit(self) -> None:
        """See Writer.commit."""
        translated(self._action, self._commit)

    def commit_new(self) -> bool:
        """`commit`, but AlreadyExists if the name is taken. Where there are no links: False, nothing done."""
        return translated(self._action, self._commit_new)

    def abort(self) -> None:
        """See Writer.abort. Also after a commit, where it does nothing."""
        self._pipeline.cancel()
        if self._folder < 0:
            return
        with contextlib.suppress(OSError):
            self._close_file()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._folder)
        self._close_folder()

    def _buffers(self) -> Pipeline:
        # Two workers: extending direct writes go one at a time in ext4, and the second already waits there.
        return Pipeline(self._put, part_size=direct.CHUNK, workers=2, allocate=direct.aligned)

    def _write(self, view: memoryview) -> None:
        blocks = len(view) // direct.BLOCK * direct.BLOCK
        if blocks >= NO_COPY and (self._in_memory or (self._direct and self._lies_right(view))):
            self._drain()
            self._put_at(self._size, view[:blocks])
            self._begin = self._size = self._size + blocks
            view = view[blocks:]
        self._pipeline.write(view)
        self._size += len(view)

    def _lies_right(self, view: memoryview) -> bool:
        """In the file and in memory. The address of a read-only buffer is not told by the standard library."""
        return not view.readonly and (self._size | direct.address(view)) % direct.BLOCK == 0

    def _drain(self) -> None:
        """Write what the buffers hold, whole blocks, and go on with empty ones."""
        if self._begin < self._size:
            index, tail = self._pipeline.finish()
            self._put(index, tail)
            self._pipeline, self._begin = self._buffers(), self._size

    def _put(self, index: int, part: memoryview) -> None:
        self._put_at(self._begin + index * direct.CHUNK, part)

    def _put_at(self, offset: int, part: memoryview) -> None:
        try:
            direct.write_all(self._fd, part, offset)
        except OSError as error:
            if error.errno not in direct.REFUSED:
                raise
            direct.switch(self._fd, False)
            direct.write_all(self._fd, part, offset)

    def _commit(self) -> None:
        self._seal()
        os.rename(self._temporary, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.fsync(self._folder)
        self._close_folder()

    def _commit_new(self) -> bool:
        self._seal()
        try:
            os.link(
                self._temporary, self._name,
                src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False,
            )  # fmt: skip
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            raise
        os.unlink(self._temporary, dir_fd=self._folder)
        os.fsync(self._folder)
        self._close_folder()
        return True

    def _seal(self) -> None:
        """All bytes durable under the temporary name."""
        index, tail = self._pipeline.finish()
        if self._direct:
            direct.switch(self._fd, False)
        direct.write_all(self._fd, tail, self._begin + index * direct.CHUNK)
        os.fsync(self._fd)
        self._close_file()

    def _close_file(self) -> None:
        """NFS reports a failed write at close at the latest, so its error counts."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _close_folder(self) -> None:
        folder, self._folder = self._folder, -1
        if folder >= 0:
            os.close(folder)
