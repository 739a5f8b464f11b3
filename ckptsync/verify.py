"""Is a committed version whole? Reads every byte once, in constant memory, and says what is wrong with which file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from .channel import Channel
from .digest import hasher
from .errors import BadShard, CkptSyncError, Corrupt, NotFound, StoreError
from .layout import SELF_COPY, TRAINER
from .manifest import MAIN_TRACK, FileEntry, Manifest, Track
from .shards.read import check_header, read_header
from .store.base import Reader, Store
from .version import VersionId

CHUNK = 16 << 20


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong, by file. `kind` is the error's stable name."""

    file: str
    kind: str
    message: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one version. `notes` are true, harmless and worth knowing, such as an unlisted extra file."""

    version: VersionId
    nbytes: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_version(channel: Channel, version: VersionId, progress: Callable[[int], None] = lambda _: None) -> Report:
    """Check the manifest, then every file's presence, size, digest and safetensors header against it.

    Storage that fails (StoreError) raises; what is on it is only reported.
    """
    try:
        manifest = channel.manifest(version)
    except Corrupt as error:
        return Report(version=version, nbytes=0, problems=(Problem("manifest", error.kind, str(error)),))
    problems = [problem for name, file, track in _files(manifest) for problem in
                _check_file(channel.store, manifest, name, file, track, progress)]  # fmt: skip
    notes = [f"{name} is not in the manifest and is never loaded" for name in _extra(channel.store, manifest)]
    return Report(version=version, nbytes=manifest.nbytes, problems=tuple(problems), notes=tuple(notes))


def _files(manifest: Manifest) -> Iterator[tuple[str, FileEntry, Track | None]]:
    for name, track in manifest.tracks.items():
        for file in track.files:
            yield (file.name if name == MAIN_TRACK else f"{name}/{file.name}"), file, track
    for file in manifest.trainer_state:
        yield f"{TRAINER}/{file.name}", file, None


def _check_file(
    store: Store,
    manifest: Manifest,
    name: str,
    file: FileEntry,
    track: Track | None,
    progress: Callable[[int], None],
) -> Iterator[Problem]:
    try:
        reader = store.open(f"{manifest.folder}/{name}")
    except (NotFound, Corrupt) as error:
        yield Problem(name, error.kind, str(error))
        return
    except StoreError as error:
        if error.kind != "store-denied":
            raise
        yield Problem(name, error.kind, str(error))
        return
    try:
        check_bytes(reader, file, manifest.digest, progress)
        if track is not None and name.endswith(".safetensors"):
            check_header(read_header(reader), file, track)
    except CkptSyncError as error:
        if isinstance(error, StoreError):
            raise
        yield Problem(name, error.kind, str(error))
    finally:
        reader.close()


def check_bytes(reader: Reader, file: FileEntry, algorithm: str, progress: Callable[[int], None]) -> None:
    """Read the whole file in order and compare size and digest. BadShard says which of the two is wrong."""
    if reader.size != file.size:
        raise BadShard(f"{file.name}: {reader.size} bytes on the store, {file.size} in the manifest")
    state, buffer = hasher(algorithm), memoryview(bytearray(min(CHUNK, file.size) or 1))
    for offset in range(0, file.size, CHUNK):
        part = buffer[: min(CHUNK, file.size - offset)]
        reader.readinto(offset, part)
        state.update(part)
        progress(len(part))
    if state.hexdigest() != file.digest:
        raise BadShard(
            f"{file.name}: the bytes are not those that were published ({algorithm} differs from the manifest)"
        )


def _extra(store: Store, manifest: Manifest) -> list[str]:
    listed = {f"{manifest.folder}/{name}" for name, _, _ in _files(manifest)} | {f"{manifest.folder}/{SELF_COPY}"}
    return sorted(e.path.rpartition("/")[2] for e in store.list(manifest.folder) if e.path not in listed)
