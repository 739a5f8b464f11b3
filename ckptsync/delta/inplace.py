"""An exported version brought to a later one where it lies, for hosts without room for a second copy.

Only whole blocks are written, and what a block is, its digest says: the new one is left alone, the old one is changed,
and one that is neither (a write that a kill cut short) is written again from the redo file, or out of the store. So
calling it again after any kill ends in the same place.

    DIR/ckptsync.json       the version that DIR holds; absent while it is between two
    DIR/.advance.json       the version that it comes from and the one that it becomes, while it is between two
    DIR/.advance.redo       the block that is being written

Nobody may read the folder meanwhile: an engine that maps its files would see both versions.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

import msgspec

from ..canonical import canonical
from ..channel import Channel
from ..errors import BadManifest, BadShard, InvalidInput, NotFound
from ..layout import SELF_COPY
from ..manifest import MAIN_TRACK, MAX_BYTES, FileEntry, Manifest, decode
from ..shards.file import FileReader
from ..shards.read import StoredTensor, check_header, read_header
from ..store.base import Store, put_bytes, read_bytes
from ..store.local import LocalStore
from ..verify import check_files, verified_chunks
from . import whole
from .codec import apply_block, as_elements, digest, element_size, parse
from .layout import Blob
from .rebuild import fetch_chain

JOURNAL = ".advance.json"
REDO = ".advance.redo"


class _Between(msgspec.Struct, frozen=True):
    start: Manifest
    target: Manifest


def advance(channel: Channel, folder: str, target: Manifest, progress: Callable[[int], None] = lambda _: None) -> None:
    """Bring the exported version in `folder` to `target`, by deltas. Call it again after a kill, with any target.

    BadManifest if the folder holds no version. InvalidInput if no deltas lead from it to the target: export that into
    a new folder. BadShard if what comes out is not what was published; the folder then holds no version. A folder that
    holds the target already is read and proven, and left as it is: BadShard if it is not what its label says. BadShard
    for a shard of another size or header than it had, BrokenChain if what lies between is damaged; a folder that still
    held a version holds it then.

    One process at a time: a second one waits until the first has ended, and goes on from there.
    """
    with _alone(folder):
        _advance(channel, folder, target, progress)


@contextmanager
def _alone(folder: str) -> Iterator[None]:
    if not os.path.isdir(folder):
        raise BadManifest(f"{folder} holds no exported version: it is no folder")
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # NFS locks nothing that is not open for writing, as no folder can be (EBADF)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _advance(channel: Channel, folder: str, target: Manifest, progress: Callable[[int], None]) -> None:
    local = LocalStore(folder)
    between = _begun(folder)
    if between is not None and between.target.id != target.id:
        _finish(channel, folder, local, between, progress)
        between = None
    if between is None:
        start = _held(folder, local)
        if start.content_digest == target.content_digest and start.id == target.id:
            _check(local, target, progress)
            return
        between = _Between(start, target)
    _finish(channel, folder, local, between, progress)


def _check(local: Store, target: Manifest, progress: Callable[[int], None]) -> None:
    with _naming_remedy(f"{local.url} is not the {target.id} that it says"):
        check_files(local, target, progress)


@contextmanager
def _naming_remedy(what: str) -> Iterator[None]:
    try:
        yield
    except (BadShard, NotFound) as error:
        raise BadShard(f"{what}: {error}; export it into a new folder") from error


def _held(folder: str, local: Store) -> Manifest:
    if not os.path.isfile(os.path.join(folder, SELF_COPY)):
        raise BadManifest(f"{folder} holds no exported version: it has no {SELF_COPY}")
    return decode(read_bytes(local, SELF_COPY, MAX_BYTES))


def _begun(folder: str) -> _Between | None:
    try:
        with open(os.path.join(folder, JOURNAL), "rb") as file:
            return msgspec.json.decode(file.read(), type=_Between)
    except FileNotFoundError:
        return None


def _finish(channel: Channel, folder: str, local: Store, between: _Between, progress: Callable[[int], None]) -> None:
    start, target = between.start, between.target
    no_way = InvalidInput(f"no deltas lead from {start.id} in {folder} to {target.id}: export it into a new folder")
    if target.kind == "adapter":  # it is made from nothing, so there is no chain that could be broken
        raise no_way
    with ExitStack() as stack:
        # All that is needed is here and whole before the folder is touched: what fails by then leaves it as it was.
        at_hand = fetch_chain(channel, target, held=lambda each: each.id == start.id, oldest=start.id)
        chain, changes = stack.enter_context(at_hand)
        if not chain.held:
            raise no_way
        _check_shards(folder, target)
        store, full = stack.enter_context(whole(channel, target))
        put_bytes(local, JOURNAL, canonical(msgspec.to_builtins(between)))
        local.delete(SELF_COPY)
        for name, track in target.tracks.items():
            for file in track.files:
                path = _path(name, file)
                source = f"{full.folder}/{path}"
                if file.name in track.by_file:
                    _advance_shard(folder, path, [each.of(name) for each in changes], store, source)
                else:
                    put_bytes(local, path, read_bytes(store, source, file.size))
                with _naming_remedy(f"{folder} did not become {target.id}"):
                    _prove(os.path.join(folder, path), file, target.digest, progress)
    put_bytes(local, SELF_COPY, full.encoded)
    for name in (REDO, JOURNAL):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def _path(track: str, file: FileEntry) -> str:
    return file.name if track == MAIN_TRACK else f"{track}/{file.name}"


def _check_shards(folder: str, target: Manifest) -> None:
    """What is written block by block is laid out as in the target: the size and the header of a shard never change."""
    with _naming_remedy(f"{folder} cannot become {target.id}"):
        for name, track in target.tracks.items():
            for file in track.files:
                if file.name in track.by_file:
                    check_header(read_header(os.path.join(folder, _path(name, file))), file, track)


def _prove(path: str, file: FileEntry, algorithm: str, progress: Callable[[int], None]) -> None:
    with closing(FileReader(path)) as reader:
        for part in verified_chunks(reader, file, algorithm, path):
            progress(len(part))


def _advance_shard(
    folder: str, path: str, changes: Sequence[Callable[[str], memoryview | None]], store: Store, source: str
) -> None:
    handle = os.open(os.path.join(folder, path), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _redo(folder, path, handle)
        with closing(FileReader(os.path.join(folder, path))) as reader:
            tensors = read_header(reader).tensors
            for name, stored in tensors.items():
                size = element_size(stored.spec.dtype)
                blobs = [parse(data, size, stored.spec.nbytes // size) for each in changes if (data := each(name))]
                for at, length, rows in _blocks(stored, blobs):
                    _advance_block(folder, path, handle, reader, (at, length), rows, store, source)
    finally:
        os.close(handle)


def _blocks(stored: StoredTensor, blobs: Sequence[Blob]) -> Iterator[tuple[int, int, list[tuple[Blob, int]]]]:
    """(offset in the file, bytes, what changes it in order) of every block that changes."""
    if len({blob.block for blob in blobs}) > 1:
        raise BadShard(f"tensor {stored.spec.name!r}: deltas with blocks of different sizes")
    for index in range(len(blobs[0].rows) if blobs else 0):
        rows = [(blob, index) for blob in blobs if blob.rows[index].changed]
        if rows:
            span, size = blobs[0].span(index), blobs[0].element_size
            yield stored.offset + span.start * size, (span.stop - span.start) * size, rows


def _advance_block(
    folder: str,
    path: str,
    handle: int,
    reader: FileReader,
    place: tuple[int, int],
    rows: Sequence[tuple[Blob, int]],
    store: Store,
    source: str,
) -> None:
    offset, length = place
    data = bytearray(length)
    reader.readinto(offset, memoryview(data))
    found, (first, at), (last, end) = digest(data), rows[0], rows[-1]
    if found == last.rows[end].new:
        return
    if found == first.rows[at].base:
        for blob, index in rows:
            apply_block(blob, index, as_elements(data, blob.element_size))
    else:
        with closing(store.open(source)) as whole_file:
            whole_file.readinto(offset, memoryview(data))
    _write(folder, path, handle, offset, data)


def _write(folder: str, path: str, handle: int, offset: int, data: bytearray) -> None:
    """First into the redo file, whole, then into its place: a kill leaves one of the two whole."""
    head = canonical({"file": path, "offset": offset, "digest": digest(data)}) + b"\n"
    redo = os.path.join(folder, REDO)
    with open(redo + ".part", "wb") as file:
        file.write(head)
        file.write(data)
    os.replace(redo + ".part", redo)
    _pwrite(handle, data, offset)


def _redo(folder: str, path: str, handle: int) -> None:
    """Write again what a kill may have cut short."""
    try:
        with open(os.path.join(folder, REDO), "rb") as file:
            head = msgspec.json.decode(file.readline())
            data = bytearray(file.read())
    except FileNotFoundError:
        return
    if head["file"] == path and digest(data) == head["digest"]:
        _pwrite(handle, data, head["offset"])


def _pwrite(handle: int, data: bytearray, offset: int) -> None:
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)
