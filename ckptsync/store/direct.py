"""O_DIRECT reads and writes: a sixth of the CPU of buffered ones, and the page cache stays with the training.

Linux wants address, offset and length aligned to the device's logical block, and says EINVAL otherwise, as do
file systems without O_DIRECT (tmpfs before 6.6, some FUSE). Every use here falls back to buffered I/O on
EINVAL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import sys

BLOCK = 4096
"""A multiple of every common logical block size (512 or 4096)."""

CHUNK = 16 << 20
"""Large enough that the device, not the system call, sets the pace."""

TMPFS = 0x01021994
"""statfs(2)."""

REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

O_DIRECT = getattr(os, "O_DIRECT", 0)


def aligned(size: int) -> memoryview:
    """A page-aligned, zeroed, writable buffer of `size` bytes; memory is taken as it is touched."""
    return memoryview(memory(size))


def memory(size: int) -> mmap.mmap:
    """`aligned`, as the mapping itself: in huge pages where the kernel has them for the asking.

    Touching 16 MiB for the first time took 2.7 CPU-ms so, 12 in small pages and 18 in a shared mapping, which is
    Python's default (Linux 6.18 in a VM); writing or hashing them takes 2 or 3. Private is safe beside a fork, too:
    whole pages are the unit of every O_DIRECT transfer here, and nobody writes to a page that is being read into.
    """
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def address(buffer: memoryview) -> int:
    """The address of a writable, contiguous, non-empty buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def switch(fd: int, on: bool) -> bool:
    """Turn O_DIRECT on or off for `fd`. False if the file system refuses it.

    Not asked for in open(): there O_CREAT with O_DIRECT may leave a file behind and still say EINVAL.
    """
    if not O_DIRECT:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if on else flags & ~O_DIRECT)
    except OSError as error:
        if error.errno in REFUSED:
            return False
        raise
    return True


def in_memory(fd: int) -> bool:
    """Whether its file system is tmpfs, where O_DIRECT has no meaning (it is taken since Linux 6.6, and copies)."""
    if sys.platform != "linux":
        return False
    found = (ctypes.c_long * 64)()  # struct statfs is 15 longs, and begins with f_type
    return bool(_libc().fstatfs(fd, found) == 0 and found[0] == TMPFS)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, through short writes."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def read_all(fd: int, direct_fd: int | None, offset: int, buffer: memoryview) -> int:
    """Fill `buffer` from `offset`; the aligned middle of it through `direct_fd` if given.

    Returns the number of bytes read, which is less than asked for only at the end of the file.
    """
    head, middle = _aligned_span(offset, buffer) if direct_fd is not None else (0, 0)
    if direct_fd is None or not middle:
        return _read(fd, offset, buffer)
    done = _read(fd, offset, buffer[:head])
    if done == head:
        done += _read_direct(direct_fd, offset + head, buffer[head : head + middle])
    return done + _read(fd, offset + done, buffer[done:])


def _aligned_span(offset: int, buffer: memoryview) -> tuple[int, int]:
    """Bytes to skip until offset and address are both aligned, and bytes in whole blocks after them."""
    head = -offset % BLOCK
    if len(buffer) < head + BLOCK or (address(buffer) + head) % BLOCK:
        return 0, 0
    return head, (len(buffer) - head) // BLOCK * BLOCK


def _read_direct(fd: int, offset: int, buffer: memoryview) -> int:
    """As far as whole blocks go; the caller reads the rest buffered."""
    done = 0
    while done < len(buffer) and done % BLOCK == 0:
        try:
            count = os.preadv(fd, [buffer[done : done + CHUNK]], offset + done)
        except OSError as error:
            if error.errno in REFUSED:
                break
            raise
        if not count:
            break
        done += count
    return done


def _read(fd: int, offset: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + CHUNK]], offset + done)
        if not count:
            break
        done += count
    return done
