"""Are a version's files there, each of its size? What listings tell, without a byte being read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .layout import DATA, trainer_files
from .manifest import FileEntry, Manifest
from .store.base import Store


def sizes(store: Store, folder: str = DATA) -> dict[str, int]:
    """Path -> bytes of every plain file in the folder, by one listing."""
    return {entry.path: entry.size for entry in store.list(folder)}


def absent_files(manifest: Manifest, listed: Mapping[str, int]) -> Iterator[tuple[str, FileEntry]]:
    """(path inside the data folder, entry) of the version's files, the trainer's too, that are not there or have
    another size. For a rollback they are those of the version that it goes back to."""
    return absent_of(manifest, (*manifest.stored_files(), *trainer_files(manifest)), listed)


def absent_of(
    manifest: Manifest, files: Iterable[tuple[str, FileEntry]], listed: Mapping[str, int]
) -> Iterator[tuple[str, FileEntry]]:
    """Those of some files of the version's folder."""
    return ((path, file) for path, file in files if listed.get(f"{manifest.folder}/{path}") != file.size)


def lacking(store: Store, manifest: Manifest) -> str:
    """What the version's folder lacks of its own shards, by one listing; empty if they are all there."""
    listed = sizes(store, manifest.folder)
    shards = ((path, file) for path, file in manifest.files() if path.endswith(".safetensors"))
    return next((said_absent(manifest, *each, listed) for each in absent_of(manifest, shards, listed)), "")


def said_absent(manifest: Manifest, path: str, file: FileEntry, listed: Mapping[str, int]) -> str:
    """What is wrong with one of those, in words."""
    found = listed.get(f"{manifest.folder}/{path}")
    return f"{path} is not there" if found is None else f"{path} has {found} of {file.size} bytes"
