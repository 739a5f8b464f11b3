"""A store in a folder: local disks, NFS, Lustre, FUSE mounts. Plain os calls, since the order of them is the
point.

Every part of a path below the root is opened on its own with O_NOFOLLOW, so no symbolic link leads outside;
the root itself may be one. Files become visible by rename or link in their own folder, after fsync and with
their final mode (0666 & ~umask by the kernel, or as configured).
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator

from ..errors import InvalidInput, NotFound, StoreDenied, StoreError
from . import direct
from .base import Entry, refuse_empty
from .local_read import LocalReader, OpenFile
from .local_write import LocalWriter
from .paths import Only, anything, is_temporary, parts_of, temporary_name, writer_is_alive
from .retry import retrying, translated

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: a FIFO in place of a file must not hang us.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_Found = list[tuple[str, os.stat_result]]


class LocalStore:
    """A folder as a store. It is made when first written to.

    `mode` of files (folders get the matching x bits); None leaves it to the umask. `direct=False` writes
    through the page cache, for files that are read on this host right after. `deadline` bounds retries, in
    seconds.
    """

    def __init__(self, root: str, *, mode: int | None = None, direct: bool = True, deadline: float = 2.0) -> None:
        if not root or "\0" in root:
            raise InvalidInput(f"{root!r} is not a folder")
        self.url = os.path.abspath(root)
        self.mode = mode
        self.direct = direct
        self.deadline = deadline
        self._synced: set[tuple[str, ...]] = set()

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def list(self, folder: str = "") -> Iterator[Entry]:
        """See Store.list. Only regular files; what vanishes meanwhile is left out."""
        for name, status in self._walk(parts_of(folder) if folder else ()):
            if not is_temporary(name.rpartition("/")[2]):
                yield Entry(name, status.st_size, status.st_mtime)

    def open(self, path: str) -> LocalReader:
        """See Store.open. NotFound also for a folder."""
        parts = parts_of(path)
        return LocalReader(self._say("read", path), lambda: self._open_file(parts), self.deadline)

    def write(self, path: str) -> LocalWriter:
        """See Store.write. The temporary file is in the folder of its final name."""
        parts, action = parts_of(path), self._say("write", path)
        folder, name, fd = retrying(action, lambda: self._open_temporary(parts), deadline=self.deadline)
        return LocalWriter(action, folder, name, parts[-1], fd, direct_io=self.direct)

    def create(self, path: str, data: bytes) -> None:
        """See Store.create. By link(); without links by O_EXCL, which a reader may see torn."""
        refuse_empty(path, data)
        writer = self.write(path)
        try:
            writer.write(data)
            if not writer.commit_new():
                translated(self._say("create", path), lambda: self._create_exclusive(parts_of(path), data))
        finally:
            writer.abort()

    def delete(self, path: str) -> None:
        """See Store.delete. Folders below the first level that are empty then go too."""
        parts = parts_of(path)
        retrying(self._say("delete", path), lambda: self._unlink(parts), deadline=self.deadline)
        self._prune(parts[:-1])

    def unfinished(self, folder: str) -> Iterator[Entry]:
        """Temporary files below `folder`, of writers that are at work and of dead ones, which no listing has."""
        for path, status in self._walk(parts_of(folder) if folder else ()):
            if is_temporary(path.rpartition("/")[2]):
                yield Entry(path=path, size=status.st_size, modified=status.st_mtime)

    def not_files(self, folder: str) -> Iterator[tuple[str, str]]:
        """(path, what it is) of all that lies right in `folder` and is no plain file."""
        parts = parts_of(folder)
        for name, status in retrying(self._say("list", folder), lambda: self._scan(parts), deadline=self.deadline):
            if not stat.S_ISREG(status.st_mode):
                yield f"{folder}/{name}", _kind(status.st_mode)

    def sweep(self, folder: str, grace: float, *, now: float | None = None, only: Only = anything) -> int:
        """Delete temporary files below `folder` that dead writers left; the number of them.

        Dead is: untouched for `grace` seconds at `now` (the file system's time; this machine's by default), and
        not of a process that runs on this host. `only` may spare paths.
        """
        now, swept = time.time() if now is None else now, 0
        for path, status in self._walk(parts_of(folder) if folder else ()):
            name = path.rpartition("/")[2]
            old = is_temporary(name) and now - status.st_mtime > grace
            if old and only(path) and not writer_is_alive(name):
                self._unlink(tuple(path.split("/")))
                self._prune(tuple(path.split("/"))[:-1])
                swept += 1
        return swept

    def _say(self, verb: str, path: str) -> str:
        return f"{verb} {self.url}/{path}"

    # Folders

    @contextlib.contextmanager
    def _folder(self, parts: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder, entered step by step."""
        if make and () not in self._synced:
            _make_root(self.url)
            self._synced.add(())
        fd = os.open(self.url, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for depth in range(1, len(parts) + 1):
                inner = self._enter(fd, parts[:depth], make)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def _enter(self, parent: int, parts: tuple[str, ...], make: bool) -> int:
        if not make:
            return _open_folder(parent, parts)
        if parts in self._synced:
            with contextlib.suppress(FileNotFoundError):
                return _open_folder(parent, parts)
        self._make(parent, parts)
        return _open_folder(parent, parts)

    def _make(self, parent: int, parts: tuple[str, ...]) -> None:
        """mkdir. EEXIST is taken at its word: on parallel file systems a second look may say otherwise.

        The parent is synced also if the folder was there, since whoever made it may have died before doing
        so.
        """
        try:
            os.mkdir(parts[-1], dir_fd=parent)
        except FileExistsError:
            pass
        else:
            if self.mode is not None:
                os.chmod(parts[-1], 0o700 | self.mode | (self.mode & 0o444) >> 2, dir_fd=parent)
        os.fsync(parent)
        self._synced.add(parts)

    def _prune(self, parts: tuple[str, ...]) -> None:
        with contextlib.suppress(OSError):  # not empty, or somebody else's: then it stays
            for depth in range(len(parts), 1, -1):
                with self._folder(parts[: depth - 1]) as fd:
                    os.rmdir(parts[depth - 1], dir_fd=fd)

    # Listing

    def _walk(self, parts: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
        action = self._say("list", "/".join(parts))
        for name, status in retrying(action, lambda: self._scan(parts), deadline=self.deadline):
            inner = (*parts, name)
            if stat.S_ISDIR(status.st_mode):
                yield from self._walk(inner)
            elif stat.S_ISREG(status.st_mode):
                yield "/".join(inner), status

    def _scan(self, parts: tuple[str, ...]) -> _Found:
        found: _Found = []
        try:
            with self._folder(parts) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
        except FileNotFoundError:
            return []
        return found

    # Files

    def _open_file(self, parts: tuple[str, ...]) -> OpenFile:
        with self._folder(parts[:-1]) as folder:
            fd = os.open(parts[-1], _FILE, dir_fd=folder)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    what = _kind(status.st_mode)
                    raise NotFound(f"{self._say('read', '/'.join(parts))}: {what} is there, not a file")
                return OpenFile(fd, _open_direct(folder, parts[-1], status), status.st_size)
            except BaseException:
                os.close(fd)
                raise

    def _open_temporary(self, parts: tuple[str, ...]) -> tuple[int, str, int]:
        """Descriptors of the folder and of a new temporary file in it, and its name."""
        for attempt in range(3):
            with self._folder(parts[:-1], make=True) as folder:
                name = temporary_name()
                try:
                    fd = os.open(name, _NEW, 0o666, dir_fd=folder)
                except FileNotFoundError:
                    if attempt == 2:
                        raise
                    continue  # a delete elsewhere pruned the folder while it was empty
                if self.mode is not None:
                    os.fchmod(fd, self.mode)
                return os.dup(folder), name, fd
        raise StoreError(f"{self._say('write', '/'.join(parts))}: its folder keeps vanishing")

    def _create_exclusive(self, parts: tuple[str, ...], data: bytes) -> None:
        with self._folder(parts[:-1]) as folder:
            fd = os.open(parts[-1], _NEW, 0o666, dir_fd=folder)
            try:
                if self.mode is not None:
                    os.fchmod(fd, self.mode)
                direct.write_all(fd, memoryview(data), 0)
                os.fsync(fd)
            except BaseException:
                os.unlink(parts[-1], dir_fd=folder)
                raise
            finally:
                os.close(fd)
            os.fsync(folder)

    def _unlink(self, parts: tuple[str, ...]) -> None:
        with contextlib.suppress(FileNotFoundError), self._folder(parts[:-1]) as folder:
            os.unlink(parts[-1], dir_fd=folder)


def _kind(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a folder" if stat.S_ISDIR(mode) else "a special file"


def _open_folder(parent: int, parts: tuple[str, ...]) -> int:
    try:
        return os.open(parts[-1], _FOLDER, dir_fd=parent)
    except NotADirectoryError:
        # O_NOFOLLOW with O_DIRECTORY says this for a symbolic link, as for a plain file.
        if stat.S_ISLNK(os.stat(parts[-1], dir_fd=parent, follow_symlinks=False).st_mode):
            raise StoreDenied(f"{'/'.join(parts)}: a symbolic link below the root is not followed") from None
        raise


def _open_direct(folder: int, name: str, status: os.stat_result) -> int | None:
    """A second descriptor with O_DIRECT, for files that are worth it; None where it is refused."""
    if not direct.O_DIRECT or status.st_size < direct.CHUNK:
        return None
    try:
        fd = os.open(name, _FILE | direct.O_DIRECT, dir_fd=folder)
    except OSError as error:
        if error.errno in direct.REFUSED:
            return None
        raise
    if os.path.samestat(os.fstat(fd), status):
        return fd
    os.close(fd)  # replaced between the two opens
    return None


def _make_root(root: str) -> None:
    """mkdir -p, each new name synced in its parent."""
    parent = os.path.dirname(root)
    try:
        os.mkdir(root)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_root(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(root)
    fd = os.open(parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
