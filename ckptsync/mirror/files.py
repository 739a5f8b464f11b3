"""The files of one version from store to store, several at once, digested on the way; none is there before it is
right."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import NamedTuple

from ..errors import BadShard
from ..layout import SELF_COPY, trainer_files
from ..logs import Pool
from ..manifest import FileEntry, Manifest, Origin
from ..store.base import Reader, Store, put_bytes, read_bytes
from ..verify import CHUNK, copy_verified, verified_chunks
from .throttle import Throttle

FILES = 4
"""Files under way at once: each is digested, and sent on, by one thread."""

IN_FLIGHT = 4
"""Reads of CHUNK bytes of one file under way at once, of fewer at a small rate: one connection to another continent is
slow, several are not. So a mirror holds FILES * IN_FLIGHT * CHUNK bytes (256 MiB) at most, and the parts that its
writers send."""


class Piece(NamedTuple):
    """One file of a version that is not at the destination yet."""

    path: str
    entry: FileEntry


def missing(target: Store, manifest: Manifest) -> list[Piece]:
    """What is still to be copied. A file that an earlier attempt brought is read once more and kept if it is right."""
    if isinstance(manifest.data_of, Origin):
        return []  # they lie in another version's folder, which was copied with that
    listed = {entry.path: entry.size for entry in target.list(manifest.folder)}
    pieces = (Piece(f"{manifest.folder}/{name}", file)
              for name, file in [*manifest.stored_files(), *trainer_files(manifest)])  # fmt: skip
    return [p for p in pieces if listed.get(p.path) != p.entry.size or not _is_right(target, p, manifest.digest)]


def _is_right(store: Store, piece: Piece, algorithm: str) -> bool:
    reader = store.open(piece.path)
    try:
        for _ in verified_chunks(reader, piece.entry, algorithm, piece.path):
            pass
    except BadShard:
        return False
    finally:
        reader.close()
    return True


def copy(
    source: Store,
    target: Store,
    pieces: Sequence[Piece],
    algorithm: str,
    throttle: Throttle,
    progress: Callable[[int], None],
) -> None:
    """All of the files, each committed at the destination if its size and digest are the manifest's; else BadShard, and
    it is not there. The first failure, or what `progress` raises, is raised once nothing is under way any more.

    `progress` is called by one thread at a time; with a rate also with 0 bytes, several times a second.
    """
    moved = _Moved(progress)
    read = partial(_read_ahead, throttle, lambda: moved(0))
    with Pool(FILES, thread_name_prefix="ckptsync-mirror") as pool:
        files = [pool.submit(copy_verified, source, piece.path, target, piece.path, piece.entry, algorithm, moved, read)
                 for piece in pieces]  # fmt: skip
        try:
            wait(files, return_when=FIRST_EXCEPTION)
        finally:
            moved.over.set()
            for file in files:
                file.cancel()
    failed = [error for file in files if not file.cancelled() and (error := file.exception())]
    for error in failed:
        if not isinstance(error, _Over):
            raise error


class _Over(Exception):
    """Another file has failed."""


class _Moved:
    """Tells of the bytes of several files, and ends those that go on when one has failed."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress, self._one, self.over = progress, threading.Lock(), threading.Event()

    def __call__(self, count: int) -> None:
        with self._one:
            if self.over.is_set():
                raise _Over
            try:
                self._progress(count)
            except BaseException:
                self.over.set()
                raise


def _read_ahead(throttle: Throttle, awake: Callable[[], None], reader: Reader) -> Iterator[memoryview]:
    """The whole file in order, the next parts being read meanwhile. A part's buffer is used again for a later one."""
    window: deque[tuple[memoryview, Future[None]]] = deque()
    piece = throttle.piece(CHUNK)
    offsets = deque(range(0, reader.size, piece))
    buffers = [bytearray(min(piece, reader.size)) for _ in range(min(IN_FLIGHT, len(offsets)))]
    with Pool(IN_FLIGHT, thread_name_prefix="ckptsync-mirror-read") as pool:
        try:
            while offsets or window:
                while offsets and buffers:
                    offset = offsets.popleft()
                    part = memoryview(buffers.pop())[: reader.size - offset]
                    throttle.take(len(part), awake)
                    window.append((part, pool.submit(reader.readinto, offset, part)))
                part, read = window.popleft()
                read.result()
                yield part
                buffers.append(part.obj)  # type: ignore[arg-type]
        finally:
            wait([read for _, read in window])


def copy_record(target: Store, manifest: Manifest) -> None:
    """The manifest's copy in the data folder, as the publisher left it."""
    path = f"{manifest.folder}/{SELF_COPY}"
    if isinstance(manifest.data_of, Origin):
        return
    listed = {entry.path: entry.size for entry in target.list(manifest.folder)}
    if listed.get(path) != len(manifest.encoded) or read_bytes(target, path, listed[path]) != manifest.encoded:
        put_bytes(target, path, manifest.encoded)
