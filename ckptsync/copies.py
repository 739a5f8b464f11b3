"""A version out of a channel into a plain folder, and back under a root."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from .channel import Channel
from .digest import hasher
from .errors import BadManifest, BadShard, InvalidInput
from .layout import SELF_COPY
from .manifest import MAX_BYTES, FileEntry, Manifest, canonical, decode, seal
from .store.base import Store, put_bytes, read_bytes
from .store.local import LocalStore

CHUNK = 16 << 20


def export_version(
    channel: Channel, manifest: Manifest, folder: str, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Copy a version into `folder`, verified on the way; a full version there is a Hugging Face checkpoint.

    `folder` must not exist or be empty (InvalidInput). `ckptsync.json` is written last, so a folder without it is a
    copy that did not finish. BadShard if a file is not what was published; what was copied before is removed.
    """
    if os.path.isdir(folder) and os.listdir(folder):
        raise InvalidInput(f"{folder} is not empty: name a new folder")
    target, copied = LocalStore(folder), []
    try:
        for name, file in manifest.files():
            _copy(channel.store, f"{manifest.folder}/{name}", target, name, file, manifest.digest, progress)
            copied.append(name)
    except BaseException:
        for name in copied:
            target.delete(name)
        raise
    put_bytes(target, SELF_COPY, canonical(msgspec.to_builtins(manifest)))


def _copy(
    source: Store,
    path: str,
    target: Store,
    name: str,
    file: FileEntry,
    algorithm: str,
    progress: Callable[[int], None],
) -> None:
    reader, writer = source.open(path), target.write(name)
    try:
        if reader.size != file.size:
            raise BadShard(f"{path}: {reader.size} bytes on the store, {file.size} in the manifest")
        state, buffer = hasher(algorithm), memoryview(bytearray(min(CHUNK, file.size)))
        for offset in range(0, file.size, CHUNK):
            part = buffer[: min(CHUNK, file.size - offset)]
            reader.readinto(offset, part)
            state.update(part)
            writer.write(part)
            progress(len(part))
        if state.hexdigest() != file.digest:
            raise BadShard(f"{path}: the bytes are not those that were published ({algorithm} differs)")
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    finally:
        reader.close()


def read_export(folder: str) -> Manifest:
    """The manifest of an exported (or copied) data folder. BadManifest if it is not one, or not whole."""
    if not os.path.isfile(os.path.join(folder, SELF_COPY)):
        raise BadManifest(f"{folder} has no {SELF_COPY}: it is no exported version (use `publish --from` instead)")
    return decode(read_bytes(LocalStore(folder), SELF_COPY, MAX_BYTES))


def import_version(
    channel: Channel, folder: str, run_id: str, progress: Callable[[int], None] = lambda _: None
) -> Manifest:
    """Publish an exported folder under a channel again, byte for byte, as a new version of a new epoch.

    The new version keeps the number where that is free, and kind, step, metadata and content digest always; where
    it came from is recorded in `metadata["imported_from"]`. Every file is verified while it is copied.
    """
    old = read_export(folder)
    if old.kind == "delta":
        raise InvalidInput(f"{folder} is a delta: import its parent first, or export the full version")
    epoch = channel.claim_epoch(run_id)
    origin = {"channel_id": old.channel_id, "version": old.id.label, "run_id": old.run_id}
    new = msgspec.structs.replace(
        old,
        channel_id=channel.channel_id,
        epoch=epoch.number,
        number=max(old.number, epoch.next_number),
        nonce=epoch.nonce,
        run_id=run_id,
        metadata={**old.metadata, "imported_from": origin},
    )
    sealed, data = seal(new)
    source = LocalStore(folder)
    for name, file in sealed.files():
        _copy(source, name, channel.store, f"{sealed.folder}/{name}", file, sealed.digest, progress)
    put_bytes(channel.store, f"{sealed.folder}/{SELF_COPY}", data)
    return channel.commit(epoch, sealed)
