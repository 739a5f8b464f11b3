"""Is a committed version whole? Reads every byte once, in constant memory, and says what is wrong with which file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec

from .channel import Channel
from .delta import whole
from .digest import hasher
from .errors import BadShard, CkptSyncError, Corrupt, NotFound, StoreDenied, StoreError
from .layout import SELF_COPY, manifest_path, trainer_files
from .manifest import MAIN_TRACK, FileEntry, Manifest
from .reading import leased
from .shards.read import check_header, read_header
from .store.base import Reader, Store, made_from
from .version import VersionId

CHUNK = 16 << 20

Read = Callable[[Reader], Iterator[memoryview]]
"""How an open file is read whole, in order."""


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong. `kind` is the error's stable name; `message` names the file again, with the reason."""

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

    Storage that fails (StoreError) raises, and so does VersionGone if it is being collected; what is on it is only
    reported.
    """
    try:
        manifest = channel.manifest(version)
    except Corrupt as error:
        return Report(version=version, nbytes=0, problems=(Problem(manifest_path(version), error.kind, str(error)),))
    with leased(channel, version, "verify"):
        return _report(channel, manifest, progress)


def _report(channel: Channel, manifest: Manifest, progress: Callable[[int], None]) -> Report:
    listed = [*manifest.stored_files(), *trainer_files(manifest)]
    problems = [p for name, file in listed for p in _check_file(channel.store, manifest, name, file, progress)]
    if manifest.kind == "delta" and not problems:
        problems = _check_rebuilt(channel, manifest, progress)
    known = {f"{manifest.folder}/{name}" for name in (SELF_COPY, *dict(listed))}
    extra = sorted(e.path.rpartition("/")[2] for e in channel.store.list(manifest.folder) if e.path not in known)
    notes = [f"{name} is not in the manifest and is never loaded" for name in extra]
    return Report(version=manifest.id, nbytes=manifest.nbytes, problems=tuple(problems), notes=tuple(notes))


def _check_rebuilt(channel: Channel, manifest: Manifest, progress: Callable[[int], None]) -> list[Problem]:
    """A delta version is whole if every file that it stands for comes out of its chain as it was published."""
    here = {path for path, _ in manifest.stored_files()}
    try:
        with whole(channel, manifest) as (store, full):
            return [problem for name, file in full.files() if name not in here for problem in
                    _check_file(store, full, name, file, progress)]  # fmt: skip
    except (Corrupt, StoreDenied) as error:
        return [Problem(manifest_path(manifest.id), error.kind, str(error))]


def _check_file(
    store: Store,
    manifest: Manifest,
    name: str,
    file: FileEntry,
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
        for part in verified_chunks(reader, file, manifest.digest, name):
            progress(len(part))
        track = manifest.tracks.get(name.rpartition("/")[0] or MAIN_TRACK)  # none for the trainer's files
        if track is not None and name.endswith(".safetensors"):
            check_header(read_header(reader), file, track)
    except CkptSyncError as error:
        if isinstance(error, StoreError):
            raise
        text = str(error)
        yield Problem(name, error.kind, text if name in text else f"{name}: {text}")
    finally:
        reader.close()


def check_files(
    store: Store, manifest: Manifest, progress: Callable[[int], None] = lambda _: None, *, prefix: str = ""
) -> None:
    """Every file of a full version that lies in a folder of its own, `store`, or below `prefix` there, is what was
    published. BadShard or NotFound, naming the file, for the first that is not."""
    for name, file in manifest.files():
        with closing(store.open(prefix + name)) as reader:
            for part in verified_chunks(reader, file, manifest.digest, prefix + name):
                progress(len(part))


def in_order(reader: Reader) -> Iterator[memoryview]:
    """The whole file, in one buffer that is used again for each chunk."""
    buffer = memoryview(bytearray(min(CHUNK, reader.size)))
    for offset in range(0, reader.size, CHUNK):
        part = buffer[: min(CHUNK, reader.size - offset)]
        reader.readinto(offset, part)
        yield part


def verified_chunks(
    reader: Reader, file: FileEntry, algorithm: str, name: str, read: Read = in_order
) -> Iterator[memoryview]:
    """The whole file in order, as `read` brings it; each chunk is good until the next.

    BadShard, with `name`, before the first chunk if the size is not the manifest's, and after the last one if the
    digest is not: nothing of it is good before the end.
    """
    if reader.size != file.size:
        raise BadShard(f"{name}: {reader.size} bytes on the store, {file.size} in the manifest")
    state = hasher(algorithm)
    for part in read(reader):
        state.update(part)
        yield part
    if state.hexdigest() != file.digest:
        wrong = f"{name}: the bytes are not those that were published ({algorithm} differs from the manifest)"
        raise BadShard(wrong + made_from(reader))


def copy_verified(
    source: Store,
    path: str,
    target: Store,
    name: str,
    file: FileEntry,
    algorithm: str,
    progress: Callable[[int], None],
    read: Read = in_order,
) -> None:
    """One file to another store, committed there if it is the manifest's; else BadShard, and nothing is there."""
    reader, writer = source.open(path), target.write(name)
    try:
        for part in verified_chunks(reader, file, algorithm, path, read):
            writer.write(part)
            progress(len(part))
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    finally:
        reader.close()
