"""The files of one delta, on this host and verified: which tensors changed, and how."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ..errors import BadShard, StoreDenied
from ..manifest import FileEntry, TensorEntry, Track, delta_path
from ..shards.read import StoredTensor, check_header, read_header
from ..store.base import Reader, Store
from ..store.retry import translated
from ..verify import verified_chunks
from .plan import Link


class Changes:
    """The changed tensors of one link. `of(track)(name)` is the blob, or None for a tensor that did not change."""

    def __init__(self) -> None:
        self._blobs: dict[str, dict[str, tuple[memoryview, StoredTensor]]] = {}

    def add(self, track: str, memory: memoryview, tensors: dict[str, StoredTensor]) -> None:
        """BadShard if a tensor has a change already."""
        known = self._blobs.setdefault(track, {})
        if twice := known.keys() & tensors.keys():
            raise BadShard(f"two files of a delta change {min(twice)!r}")
        known.update({name: (memory, stored) for name, stored in tensors.items()})

    def of(self, track: str) -> Callable[[str], memoryview | None]:
        blobs = self._blobs.get(track, {})

        def find(name: str) -> memoryview | None:
            if name not in blobs:
                return None
            memory, stored = blobs[name]
            return memory[stored.offset : stored.offset + stored.spec.nbytes]

        return find


@contextmanager
def fetch_changes(store: Store, link: Link, spool: str | None = None) -> Iterator[Changes]:
    """The link's files copied into unnamed files below `spool`, and verified. BadShard or NotFound if one is not
    what its manifest says, StoreFull if there is no room below `spool`."""
    changes = Changes()
    with ExitStack() as stack:
        for track, files in link.base.files.items():
            for file in files:
                path = f"{link.manifest.folder}/{delta_path(link.base.id, track, file.name)}"
                try:
                    memory = stack.enter_context(_fetch(store, path, file, link.manifest.digest, spool))
                    changes.add(track, memory, _tensors(memory, file, path))
                except StoreDenied as error:  # a link, say. Not gone round: what is denied now may be allowed again
                    way = f"the delta of {link.manifest.id} against {link.base.id} is in it"
                    raise StoreDenied(f"{error}; {way}: let it be read, or take another version") from error
        yield changes


@contextmanager
def _fetch(store: Store, path: str, file: FileEntry, algorithm: str, spool: str | None) -> Iterator[memoryview]:
    reader = store.open(path)
    try:
        # What fails as no error of ours is this host's own disk, not the store.
        memory = translated(f"copy {path} to this host", lambda: _copied(reader, path, file, algorithm, spool))
    finally:
        reader.close()
    yield memory


def _copied(reader: Reader, path: str, file: FileEntry, algorithm: str, spool: str | None) -> memoryview:
    with tempfile.TemporaryFile(dir=spool, prefix=".delta-") as copy:
        for part in verified_chunks(reader, file, algorithm, path):
            copy.write(part)
        copy.flush()
        # Unmapped with the last view of it.
        return memoryview(mmap.mmap(copy.fileno(), file.size, access=mmap.ACCESS_READ))


class _Memory:
    """Bytes at hand as a store's reader."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self.size = memory, len(memory)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        part = self._memory[offset : offset + len(buffer)]
        if len(part) != len(buffer):
            raise BadShard(f"ends before byte {offset + len(buffer)}")
        buffer[:] = part

    def close(self) -> None:
        pass


def _tensors(memory: memoryview, file: FileEntry, path: str) -> dict[str, StoredTensor]:
    header = read_header(_Memory(memory), name=path)
    if odd := [name for name, stored in header.tensors.items() if stored.spec.dtype != "U8"]:
        raise BadShard(f"{path}: {odd[0]!r} is no encoded change")
    entries = tuple(TensorEntry(name=name, dtype="U8", shape=s.spec.shape, digest="", file=file.name)
                    for name, s in header.tensors.items())  # fmt: skip
    check_header(header, file, Track(files=(file,), tensors=entries))
    return header.tensors
