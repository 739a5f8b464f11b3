"""Stores as weak as real ones are seen to be, around any store: what a mount, a gateway or a cache does not keep.

Each is one weakness. They may be nested: `LosesAnswers(ListsLate(store, 1.0), lost)`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from ..digest import Bytes
from ..errors import AlreadyExists, NotFound, StoreDenied, StoreFull, StoreUnavailable
from ..store.base import Entry, Reader, Store, Writer, put_bytes
from .hooks import HookedStore

Clock = Callable[[], float]


class Slow(HookedStore):
    """Each operation takes up to `seconds` longer, drawn with `rng`: operations of several threads change places."""

    def __init__(self, store: Store, seconds: float, rng: random.Random) -> None:
        super().__init__(store, lambda *_: time.sleep(rng.uniform(0.0, seconds)))


class LosesAnswers(HookedStore):
    """Every change is made, and of some of them the caller is told StoreUnavailable: those for which `lost` is true."""

    def __init__(self, store: Store, lost: Callable[[str, str], bool]) -> None:
        super().__init__(store, after=self._lose)
        self._is_lost = lost

    def _lose(self, operation: str, path: str) -> None:
        if operation in {"commit", "create", "delete"} and self._is_lost(operation, path):
            raise StoreUnavailable(f"{operation} {path}: no answer within 30 s")


class LetsBothWin(HookedStore):
    """Of two creators of one name both are told that they won; the first one's bytes stay. FUSE clients of SeaweedFS
    did so in 49 of 60 races with O_EXCL (docs/design/0001)."""

    def create(self, path: str, data: bytes) -> None:
        try:
            super().create(path, data)
        except AlreadyExists:
            return


class RemembersAbsence(HookedStore):
    """A name that was looked for and not found stays absent for `seconds`, as on NFS without `lookupcache=positive`."""

    def __init__(self, store: Store, seconds: float, clock: Clock = time.monotonic) -> None:
        super().__init__(store)
        self._seconds, self._clock, self._absent = seconds, clock, dict[str, float]()

    def open(self, path: str) -> Reader:
        if self._clock() < self._absent.get(path, 0.0):
            raise NotFound(f"{path} was not there when it was looked for last")
        try:
            return super().open(path)
        except NotFound:
            self._absent[path] = self._clock() + self._seconds
            raise


class ListsLate(HookedStore):
    """Listings of the folders that `late` picks are up to `seconds` old, as from a gateway with a metadata cache."""

    def __init__(
        self, store: Store, seconds: float, late: Callable[[str], bool] = lambda _: True, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(store)
        self._seconds, self._late, self._clock = seconds, late, clock
        self._known: dict[str, tuple[float, list[Entry]]] = {}

    def list(self, folder: str) -> Iterator[Entry]:
        if not self._late(folder):
            return super().list(folder)
        until, entries = self._known.get(folder, (0.0, []))
        if self._clock() >= until:
            entries = list(super().list(folder))
            self._known[folder] = (self._clock() + self._seconds, entries)
        return iter(entries)


class TearsWrites(HookedStore):
    """A file is visible under its name before it is whole: half of it, for `seconds`, and only half for ever if the
    writer dies in between (`dies` raises). What `rename` over NFS or a copying gateway does."""

    def __init__(self, store: Store, seconds: float = 0.0, dies: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(store)
        self._seconds, self._dies = seconds, dies

    def write(self, path: str) -> Writer:
        return _TornWriter(self, path)

    def tear(self, path: str, data: bytes) -> None:
        put_bytes(self.inner, path, data[: len(data) // 2])
        time.sleep(self._seconds)
        self._dies(path)
        put_bytes(self.inner, path, data)


class _TornWriter:
    def __init__(self, store: TearsWrites, path: str) -> None:
        self._store, self._path, self._data = store, path, bytearray()

    def write(self, data: Bytes) -> None:
        self._data += data

    def commit(self) -> None:
        self._store.tear(self._path, bytes(self._data))

    def abort(self) -> None: ...


class Full(HookedStore):
    """Takes `nbytes` in all, then StoreFull."""

    def __init__(self, store: Store, nbytes: int) -> None:
        super().__init__(store)
        self.left = nbytes

    def take(self, nbytes: int) -> None:
        if nbytes > self.left:
            raise StoreFull(f"no space left on {self.url}")
        self.left -= nbytes

    def write(self, path: str) -> Writer:
        return _CountedWriter(super().write(path), self.take)

    def create(self, path: str, data: bytes) -> None:
        self.take(len(data))
        super().create(path, data)


class _CountedWriter:
    def __init__(self, inner: Writer, take: Callable[[int], None]) -> None:
        self._inner, self._take = inner, take
        self.commit, self.abort = inner.commit, inner.abort

    def write(self, data: Bytes) -> None:
        self._take(memoryview(data).nbytes)
        self._inner.write(data)


class Undeletable(HookedStore):
    """Refuses to delete what `keeps` picks (StoreDenied), as a bucket with object lock does."""

    def __init__(self, store: Store, keeps: Callable[[str], bool] = lambda _: True) -> None:
        super().__init__(store)
        self._keeps = keeps

    def delete(self, path: str) -> None:
        if self._keeps(path):
            raise StoreDenied(f"{path} may not be deleted")
        super().delete(path)


class LosesPower(HookedStore):
    """A server that says yes before anything is on disk: `power_cut` takes back, for each file, what was not asked for
    durably. `lies` picks the files whose durable writes were none; all others stay."""

    def __init__(self, store: Store, lies: Callable[[str], bool]) -> None:
        super().__init__(store, after=self._remember)
        self._lies, self._unsure = lies, list[str]()

    def _remember(self, operation: str, path: str) -> None:
        if operation in {"commit", "create"} and self._lies(path):
            self._unsure.append(path)

    def power_cut(self) -> list[str]:
        """The files that are gone."""
        lost, self._unsure = self._unsure, []
        for path in lost:
            self.inner.delete(path)
        return lost
