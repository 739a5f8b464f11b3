"""What the page shows, gathered from one channel: its status, what each version changed, and one version in detail."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ..channel import Channel
from ..errors import Corrupt, InvalidInput, NotFound
from ..manifest import Manifest
from ..status import ChannelStatus, Observer
from ..version import VersionId, parse_label
from .changes import VersionChange, compared_change, quick_change

RECENT = 60
"""So many of the newest versions have their changes looked at."""

BUDGET = 1.0
"""Seconds of one look for changes that are not known yet; the rest waits for the next looks."""

MAX_FILES = 200
MAX_METADATA = 20_000
"""Characters of a version's metadata; the manifest itself has all."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """One look, as the page gets it. `changes` by version."""

    status: ChannelStatus
    changes: dict[str, VersionChange]


class Board:
    """Looks at one channel for all who ask, from any thread: at most once in `every` seconds."""

    def __init__(self, channel: Channel, *, every: float = 2.0) -> None:
        self.every = every
        self._channel, self._observer = channel, Observer(channel)
        self._changes: dict[VersionId, VersionChange | None] = {}
        self._looking, self._comparing = threading.Lock(), threading.Lock()
        self._page = b""
        self._looked = float("-inf")

    def page(self) -> bytes:
        """A `Page` as JSON, not older than `every` seconds. Raises StoreError."""
        with self._looking:
            if time.monotonic() - self._looked > self.every:
                self._page = msgspec.json.encode(self.look(BUDGET))
                self._looked = time.monotonic()
            return self._page

    def look(self, budget: float = float("inf")) -> Page:
        """Look now, for changes `budget` seconds at most. Raises StoreError."""
        status, until = self._observer.look(), time.monotonic() + budget
        complete = [v for each in status.versions if not each.problem and (v := parse_label(each.version)) is not None]
        for version in reversed(complete[-RECENT:]):
            if version not in self._changes and time.monotonic() < until:
                self._changes[version] = self._quick(version, complete)
        changes = {v.label: found for v in complete if (found := self._changes.get(v)) is not None}
        return Page(status=status, changes=changes)

    def detail(self, text: str) -> dict[str, Any]:
        """What the page says of one version besides. InvalidName, VersionNotFound, BadManifest or StoreError."""
        with self._looking:
            return _detail(self._channel.resolve(text))

    def manifest(self, text: str) -> bytes:
        """The manifest as it is stored. Raises what `detail` raises."""
        with self._looking:
            return self._channel.resolve(text).encoded

    def compare(self, text: str, base: str = "") -> VersionChange:
        """What the version changed against `base`, or the one before it, exactly. One comparison at a time; that
        with the version before is remembered.

        InvalidInput if there is none before it, without torch, or while another comparison runs; else as `detail`.
        """
        if not self._comparing.acquire(blocking=False):
            raise InvalidInput("another comparison is under way: wait for it")
        try:
            # A channel of its own: this takes minutes, and the page goes on looking.
            channel = Channel.open(self._channel.store, require_signature=self._channel.trust)
            manifest = channel.resolve(text)
            before = _before(channel, manifest, channel.committed())
            against = channel.resolve(base) if base else before
            if against is None:
                raise InvalidInput(f"{manifest.id} has no version before it to be compared with")
            found = compared_change(channel, against, manifest)
            if before is not None and against.id == before.id:
                self._changes[manifest.id] = found
                self._looked = float("-inf")
            return found
        except ModuleNotFoundError as error:
            raise InvalidInput(f"comparing needs {error.name}: pip install 'ckptsync[torch]'") from error
        finally:
            self._comparing.release()

    def _quick(self, version: VersionId, complete: Sequence[VersionId]) -> VersionChange | None:
        try:
            manifest = self._channel.manifest(version)
            return quick_change(self._channel, manifest, _before(self._channel, manifest, complete))
        except (Corrupt, NotFound):
            return None


def _before(channel: Channel, manifest: Manifest, there: Sequence[VersionId]) -> Manifest | None:
    """The version before it on its line, if it is there still; `there` ascending."""
    for version in _candidates(channel, manifest, there):
        try:
            return channel.manifest(version)
        except (Corrupt, NotFound):
            continue
    return None


def _candidates(channel: Channel, manifest: Manifest, there: Sequence[VersionId]) -> Iterator[VersionId]:
    if isinstance(manifest.previous, VersionId):
        yield manifest.previous
    if manifest.parent is not None:
        yield manifest.parent.id
    own = [version for version in there if version.epoch == manifest.epoch and version < manifest.id]
    if own:
        yield own[-1]
        return
    claim = channel.claims().get(manifest.epoch)
    if claim is not None and claim.resumed_from is not None:
        yield claim.resumed_from


def _detail(manifest: Manifest) -> dict[str, Any]:
    files = [{"path": path, "size": file.size, "digest": file.digest} for path, file in manifest.stored_files()]
    metadata = msgspec.json.encode(manifest.metadata).decode()
    return {
        "version": manifest.id.label,
        "run_id": manifest.run_id,
        "content_digest": manifest.content_digest,
        "folder": manifest.folder,
        "digest": manifest.digest,
        "producer": manifest.producer,
        "metadata": metadata[:MAX_METADATA],
        "canary": manifest.canary is not msgspec.UNSET,
        "deltas": [{"base": base.id.label, "bytes": base.nbytes} for base in manifest.deltas],
        "trainer_state": sum(file.size for file in manifest.trainer_state),
        "tracks": [
            {"name": name, "bytes": track.nbytes, "tensors": len(track.tensors), "model": track.model,
             "dtypes": dict(Counter(tensor.dtype for tensor in track.tensors))}
            for name, track in manifest.tracks.items()
        ],
        "files": files[:MAX_FILES],
        "more_files": max(0, len(files) - MAX_FILES),
    }  # fmt: skip
