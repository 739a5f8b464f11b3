"""Which files of a staged version are verified: lines of JSON that survive a kill.

A line holds what the file looked like when its digest was found right. It is believed as long as the file
looks the same and the host has not been rebooted: the stage does not fsync, so after a power cut a file may
hold zeros.
"""

from __future__ import annotations

import functools
import os
import stat
from typing import NamedTuple

import msgspec

from ckptsync.digest import hasher
from ckptsync.manifest import FileEntry

CHUNK = 16 << 20


class _Line(msgspec.Struct, frozen=True):
    boot: str
    path: str
    size: int
    digest: str
    inode: int
    modified: int


class _Place(NamedTuple):
    """How far a journal was read."""

    inode: int
    offset: int


class Journal:
    """One version's journal. Written by whoever fills the version, read by all."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._known: set[_Line] = set()
        self._read = _Place(0, 0)

    def vouches(self, path: str, entry: FileEntry) -> bool:
        """Is the file at `path` known to be `entry`, unchanged since it was verified?"""
        line = _line(path, entry)
        return line is not None and line in self._lines()

    def rereads(self, path: str, entry: FileEntry, algorithm: str) -> bool:
        """Does the local file have the right digest? Reads it once."""
        if _line(path, entry) is None:
            return False
        state, buffer = hasher(algorithm), memoryview(bytearray(CHUNK))
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                state.update(buffer[:count])
        return state.hexdigest() == entry.digest

    def add(self, path: str, entry: FileEntry) -> None:
        """The file was verified just now, and is not written any more."""
        line = _line(path, entry)
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(handle, "ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _lines(self) -> set[_Line]:
        """Reads what came since the last call: a version of a thousand files asks a thousand times."""
        try:
            with open(self.path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._read.inode:
                    self._known, self._read = set(), _Place(inode, 0)
                file.seek(self._read.offset)
                whole = file.read().rpartition(b"\n")[0]  # the last line may be one of a process that was killed
        except FileNotFoundError:
            return set()
        self._known |= {line for raw in whole.splitlines() if (line := _parse(raw)) is not None}
        self._read = _Place(inode, self._read.offset + len(whole))
        return self._known


def _parse(raw: bytes) -> _Line | None:
    try:
        return msgspec.json.decode(raw, type=_Line)
    except msgspec.DecodeError:
        return None  # a line that a killed process began, and the next one's behind it


def _line(path: str, entry: FileEntry) -> _Line | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
        return None
    return _Line(boot_id(), path, entry.size, entry.digest, found.st_ino, found.st_mtime_ns)


@functools.cache
def boot_id() -> str:
    """The kernel's name for this boot of the host; empty where there is none, and then every boot is the
    same."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""
