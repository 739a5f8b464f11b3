"""A delta version seen as the full version that it stands for: a store whose files are rebuilt while they are read.

    with open_chain(channel, manifest) as store:
        store.open(f"{manifest.folder}/model-00001-of-00004.safetensors")     # byte for byte what a full publish writes

So whatever reads full versions (stage, export, resume, verify) reads these, and proves them by the same digests. A
file's blocks are made one by one from the start's bytes and every link's change, and a few are kept. Nothing on the
store or at hand is ever changed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from .. import logs
from ..channel import Channel
from ..digest import Bytes
from ..errors import BadShard, BrokenChain, NotFound, StoreDenied
from ..manifest import MAIN_TRACK, FileEntry, Manifest, Track
from ..presence import lacking
from ..shards.read import Header, StoredTensor, check_header, read_header
from ..store.base import Entry, Reader, Store, Writer
from ..store.views import target as checked
from ..version import VersionId
from .codec import apply_block, as_elements, element_size, parse
from .layout import Blob
from .links import Changes, fetch_changes
from .plan import Chain, Edge, cheapest

log = logs.get(__name__)

KEPT = 16
"""Blocks that stay in memory after they were made: neighbouring reads share them. Of bf16 one has 8 MiB."""

Open = Callable[[str], Reader]
"""Opens a file of the start by its path in the data folder."""


@contextmanager
def open_chain(
    channel: Channel,
    manifest: Manifest,
    *,
    held: Callable[[Manifest], Open | None] | None = None,
    oldest: VersionId | None = None,
    spool: str | None = None,
    damaged: Mapping[VersionId, str] = {},
) -> Iterator[RebuiltStore]:
    """See `ckptsync.delta.open_chain`."""
    is_held = None if held is None else lambda each: held(each) is not None
    found = fetch_chain(channel, manifest, held=is_held, oldest=oldest, spool=spool, damaged=damaged)
    with found as (chain, changes):
        yield RebuiltStore(channel.store, chain, changes, held(chain.start) if held else None)


@contextmanager
def fetch_chain(
    channel: Channel,
    manifest: Manifest,
    *,
    held: Callable[[Manifest], bool] | None,
    oldest: VersionId | None = None,
    spool: str | None = None,
    damaged: Mapping[VersionId, str] = {},
) -> Iterator[tuple[Chain, list[Changes]]]:
    """The cheapest way of which every delta is whole and every shard there, and the deltas: on this host, verified.
    Errors as there."""
    avoid: dict[Edge, str] = {}
    while True:
        find = partial(cheapest, channel, manifest, held=held, oldest=oldest, avoid=avoid)
        chain = _from_what_is_there(channel, find(damaged=damaged), find, damaged)
        with ExitStack() as stack:
            changes = []
            for link in chain.links:
                try:
                    changes.append(stack.enter_context(fetch_changes(channel.store, link, spool)))
                except (BadShard, NotFound) as error:
                    _passed_over("the delta of %s against %s is", link.edge, error)
                    avoid[link.edge] = str(error)
                    break
            else:
                yield chain, changes
                return


def _from_what_is_there(
    channel: Channel, chain: Chain, find: Callable[..., Chain], damaged: Mapping[VersionId, str]
) -> Chain:
    """The chain, or the next one of whose start every shard is there. If there is none the chain itself: who opens its
    files will say best what is wrong with them."""
    other, damaged = chain, dict(damaged)
    while not other.held and (problem := lacking(channel.store, other.start)):
        damaged[other.start.id] = problem
        try:
            other = find(damaged=damaged)
        except BrokenChain:
            return chain
    if other is not chain:
        _passed_over("the shards of %s are", (chain.start.id,), damaged[chain.start.id])
    return other


def _passed_over(what: str, versions: tuple[VersionId, ...], why: object) -> None:
    log.warning(f"{what} passed over: %s", *versions, why, extra={"event": "delta-passed-over"})


class RebuiltStore:
    """Another store, in which one delta version's folder holds a full version."""

    def __init__(self, store: Store, chain: Chain, changes: Sequence[Changes], start: Open | None) -> None:
        self._store, self._chain, self._changes = store, chain, changes
        self._open_start = start or (lambda path: store.open(f"{chain.start.folder}/{path}"))
        self._held = start is not None
        self._folder = chain.target.folder
        self._files = dict(chain.target.files())

    @property
    def url(self) -> str:
        return self._store.url

    def list(self, folder: str) -> Iterator[Entry]:
        listed = {entry.path: entry for entry in self._store.list(folder)}
        if folder == self._folder:
            listed |= {(path := f"{folder}/{name}"): Entry(path, file.size, 0) for name, file in self._files.items()}
        return iter(listed.values())

    def open(self, path: str) -> Reader:
        name = path.removeprefix(f"{self._folder}/")
        if name == path or name not in self._files:
            return self._store.open(path)
        for link in reversed(self._chain.links):
            if _has(link.manifest, name):
                return self._store.open(f"{link.manifest.folder}/{name}")
        if not name.endswith(".safetensors") or not self._chain.links:
            return self._start(name)
        return self._shard(name)

    def _start(self, name: str) -> Reader:
        try:
            return self._open_start(name)
        except (BadShard, NotFound, StoreDenied) as error:
            raise type(error)(f"{error}; {self._chain.target.id} {self._made_from(name)}") from error

    def _shard(self, name: str) -> Reader:
        track = name.rpartition("/")[0] or MAIN_TRACK
        start = self._start(name)
        try:
            return _Shard(start, self._files[name], self._chain.target.tracks[track], [
                each.of(track) for each in self._changes
            ], self._made_from(name))  # fmt: skip
        except BaseException:
            start.close()
            raise

    def _made_from(self, name: str) -> str:
        """What is changed by deltas is proven by them, and they were verified: what is wrong was so in the start."""
        start = self._chain.start
        where = "a copy at hand" if self._held else f"{start.folder}/{name}"
        look = f"take another version if `ckptsync verify {self.url} {start.id}` finds it damaged"
        look += f", or let `ckptsync fsck {self.url} --repair` go round it"
        return f"is made from {name} of {start.id} ({where}): {look}"

    def write(self, path: str) -> Writer:
        return self._store.write(path)

    def create(self, path: str, data: bytes) -> None:
        self._store.create(path, data)

    def delete(self, path: str) -> None:
        self._store.delete(path)


def _has(manifest: Manifest, name: str) -> bool:
    """Whether a version that is made from changes has this file itself. A full one, of which shards are lost, has all
    others."""
    if manifest.kind == "full":
        return not name.endswith(".safetensors")
    return manifest.parent is not None and name in manifest.parent.stored


class _Shard:
    """One shard: the start's bytes, with every changed tensor's blocks made new."""

    def __init__(
        self,
        start: Reader,
        file: FileEntry,
        track: Track,
        changes: Sequence[Callable[[str], Bytes | None]],
        made_from: str,
    ) -> None:
        self._start, self.size, self.made_from, self._name = start, file.size, made_from, file.name
        try:
            self._header: Header = read_header(start, name=file.name)
            check_header(self._header, file, track)
        except BadShard as error:
            raise BadShard(f"{error}, which {made_from}") from error
        self._changes = changes
        self._blobs: dict[str, list[Blob]] = {}
        self._made: OrderedDict[tuple[str, int], Future[memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    def readinto(self, offset: int, buffer: memoryview) -> None:
        view = checked(f"rebuilding bytes of a shard of {self.size}", offset, buffer, self.size)
        stop = offset + len(view)
        self._plain(offset, view, 0, self._header.data_start)
        for name, stored in self._header.tensors.items():
            begin, end = max(offset, stored.offset), min(stop, stored.offset + stored.spec.nbytes)
            if begin < end:
                try:
                    self._tensor(name, stored, begin - stored.offset, view[begin - offset : end - offset])
                except BadShard as error:
                    raise BadShard(f"{self._name}: tensor {name!r}: {error}, which {self.made_from}") from error

    def close(self) -> None:
        self._start.close()

    def _plain(self, offset: int, view: memoryview, first: int, last: int) -> None:
        begin, end = max(offset, first), min(offset + len(view), last)
        if begin < end:
            self._start.readinto(begin, view[begin - offset : end - offset])

    def _tensor(self, name: str, stored: StoredTensor, at: int, view: memoryview) -> None:
        blobs = self._blobs_of(name, stored)
        if not blobs:
            self._start.readinto(stored.offset + at, view)
            return
        unit = max(blob.block for blob in blobs) * blobs[0].element_size
        done = 0
        while done < len(view):
            index, inside = divmod(at + done, unit)
            piece = self._block(name, stored, index, unit)[inside : inside + len(view) - done]
            view[done : done + len(piece)] = piece
            done += len(piece)

    def _blobs_of(self, name: str, stored: StoredTensor) -> list[Blob]:
        with self._lock:
            if name not in self._blobs:
                size = element_size(stored.spec.dtype)
                found = [blob for change in self._changes if (blob := change(name)) is not None]
                self._blobs[name] = [parse(blob, size, stored.spec.nbytes // size) for blob in found]
            return self._blobs[name]

    def _block(self, name: str, stored: StoredTensor, index: int, unit: int) -> memoryview:
        """Made by whoever asks first; the others wait for it."""
        key = (name, index)
        with self._lock:
            future = self._made.get(key)
            mine = future is None
            if future is None:
                future = self._made[key] = Future()
                while len(self._made) > KEPT:
                    self._made.popitem(last=False)
        if mine:
            try:
                future.set_result(self._make(name, stored, index, unit))
            except BaseException as error:  # noqa: BLE001 - raised again by each who waits
                future.set_exception(error)
        return future.result()

    def _make(self, name: str, stored: StoredTensor, index: int, unit: int) -> memoryview:
        data = np.empty(min(unit, stored.spec.nbytes - index * unit), dtype=np.uint8)
        self._start.readinto(stored.offset + index * unit, data.data)
        for blob in self._blobs[name]:
            elements = as_elements(data.data, blob.element_size)
            per = unit // blob.element_size // blob.block
            for at in range(-(-len(elements) // blob.block)):
                apply_block(blob, index * per + at, elements[at * blob.block : (at + 1) * blob.block])
        return data.data
