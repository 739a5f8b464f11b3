"""A local shard file as a store.Reader: opened without following links, read in large parts.

Never mapped unless asked to: over NFS, Lustre and FUSE a mapped file comes in pages of 4 KiB, and a file that
vanishes under a map is SIGBUS instead of an error.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat

from ..digest import hasher
from ..errors import BadShard, CkptSyncError, StoreDenied, StoreError, StoreUnavailable
from ..logs import Pool
from ..store import direct

_THREADS = 4


class FileReader:
    """A plain local file. Symbolic links are refused unless `follow_symlinks`.

    BadShard names the path and what was expected there: a folder, a pipe or a missing file is not a shard. StoreDenied,
    StoreUnavailable or StoreError if it may be one, and cannot be opened or read now.
    """

    def __init__(self, path: str, *, follow_symlinks: bool = False) -> None:
        self.path = path
        # O_NONBLOCK: opening a pipe must not wait for a writer. It means nothing for regular files.
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_symlinks else os.O_NOFOLLOW)
        self._fd = self._open()
        status = os.fstat(self._fd)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise BadShard(f"{path}: expected a safetensors file, but it is {kind}")

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole of `buffer` from `offset`; BadShard if the file ends before."""
        self._read(None, offset, buffer)

    def close(self) -> None:
        os.close(self._fd)

    def read_arena(self, algorithm: str | None = None) -> tuple[mmap.mmap, str]:
        """The whole file in fresh page-aligned memory, and its hex digest ("" without an algorithm).

        Read past the page cache where the file system can, by several threads, and digested meanwhile. The
        memory is freed with the last view of it.
        """
        arena = direct.memory(self.size)
        direct_fd = self._open()
        try:
            fd = direct_fd if direct.switch(direct_fd, True) else None
            return arena, self._fill(memoryview(arena), fd, algorithm)
        finally:
            os.close(direct_fd)

    def map(self) -> mmap.mmap:
        """The whole file, mapped privately: a write through the map stays in this process."""
        return mmap.mmap(self._fd, self.size, access=mmap.ACCESS_COPY)

    def _fill(self, memory: memoryview, direct_fd: int | None, algorithm: str | None) -> str:
        state = hasher(algorithm) if algorithm else None
        starts = range(0, self.size, direct.CHUNK)
        with Pool(_THREADS, thread_name_prefix="ckptsync-read") as pool:
            parts = [memory[start : start + direct.CHUNK] for start in starts]
            reads = [pool.submit(self._read, direct_fd, *where) for where in zip(starts, parts, strict=True)]
            try:
                for read, part in zip(reads, parts, strict=True):
                    read.result()
                    if state:
                        state.update(part)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return state.hexdigest() if state else ""

    def _read(self, direct_fd: int | None, offset: int, buffer: memoryview) -> None:
        try:
            done = direct.read_all(self._fd, direct_fd, offset, buffer)
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be read from byte {offset} on: {error.strerror}") from error
        if done < buffer.nbytes:
            raise BadShard(f"{self.path}: ends at byte {offset + done}, before {offset + buffer.nbytes}")

    def _open(self) -> int:
        try:
            return os.open(self.path, self._flags)
        except (OSError, ValueError) as error:
            raise _open_error(self.path, error) from error


_NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG}
"""What is said of the file. All else is said of the host or the mount, such as EMFILE, EIO and ESTALE, and passes."""


def _open_error(path: str, error: OSError | ValueError) -> CkptSyncError:
    what = f"{path}: expected a safetensors file, but"
    if isinstance(error, PermissionError):
        return StoreDenied(f"{what} it may not be read: {error.strerror}")
    if os.path.islink(path):
        return BadShard(f"{what} it is a symbolic link, which is not followed")
    if isinstance(error, OSError) and error.errno not in _NO_SUCH_FILE:
        return StoreUnavailable(f"{path}: cannot be opened: {error.strerror}")
    return BadShard(f"{what} {getattr(error, 'strerror', None) or error}")
