"""A version out of a channel into a plain folder, and back under a root."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec

from .channel import Channel
from .delta import whole
from .epochs import Epoch
from .errors import BadShard, BrokenChain, InvalidInput, NotFound, VersionGone
from .layout import SELF_COPY
from .manifest import FORMAT, MAX_BYTES, Manifest, Parent, decode
from .preflight import check_space
from .reading import leased
from .signing import Signer
from .store import open_store
from .store.base import Store, put_bytes, read_bytes
from .store.fresh import fresh_folder
from .store.local import LocalStore
from .verify import check_files, copy_verified
from .version import VersionId


def export_version(
    channel: Channel, manifest: Manifest, folder: str, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Copy a version into `folder`, verified on the way; there it is a Hugging Face checkpoint, or a PEFT directory.
    A delta version becomes the full one that it stands for. A trainer's state stays behind.

    `folder` must not exist or be empty (InvalidInput). `ckptsync.json` is written last, so a folder without it is a
    copy that did not finish. BadShard if a file is not there as it was published,
    BrokenChain if that is so of what a delta version is made from. After a failure nothing is left.
    """
    with (
        naming_damage(channel, manifest),
        fresh_folder(folder, whole=SELF_COPY) as target,
        leased(channel, manifest.id, "export"),
        whole(channel, manifest) as (store, full),
    ):
        for name, file in full.files():
            copy_verified(store, f"{full.folder}/{name}", target, name, file, full.digest, progress)
        put_bytes(target, SELF_COPY, full.encoded)


@contextmanager
def naming_damage(channel: Channel, manifest: Manifest) -> Iterator[None]:
    """What a version's own files lack is BadShard, and what a delta version is made from lacks is BrokenChain: not
    NotFound, which says that the version itself is not there; that it was collected meanwhile is VersionGone."""
    try:
        yield
    except VersionGone:
        raise
    except (BadShard, NotFound) as error:
        channel.check_still_there(manifest.id)
        if manifest.kind == "delta":
            raise BrokenChain(f"{manifest.id} cannot be rebuilt: {error}") from error
        raise BadShard(f"{manifest.id} is not whole: {error}") from error


def read_export(folder: str) -> Manifest:
    """The manifest of an exported (or copied) data folder. InvalidInput if it is not one, BadManifest if it is torn."""
    if not os.path.isdir(folder):
        raise InvalidInput(f"{folder}: there is no such folder")
    if not os.path.isfile(os.path.join(folder, SELF_COPY)):
        raise InvalidInput(
            f"{folder} has no {SELF_COPY}: it is no exported version, or a copy that did not finish. A checkpoint goes "
            "by `publish --from`; what `export --since` writes is for other stacks, and does not come back"
        )
    return decode(read_bytes(LocalStore(folder), SELF_COPY, MAX_BYTES))


def _check_export(folder: str, progress: Callable[[int], None]) -> Manifest:
    """The manifest of an exported folder in which every byte is right: before a channel is made or a trainer fenced for
    it. InvalidInput for a folder that is none, or that holds changes alone; BadShard or NotFound, naming the file."""
    manifest = read_export(folder)
    if manifest.kind == "delta":
        raise InvalidInput(f"{folder} is a delta: import its parent first, or export the full version")
    check_files(LocalStore(folder), manifest, progress)
    return manifest


def import_version(
    channel: Channel | str,
    folder: str,
    run_id: str,
    progress: Callable[[int], None] = lambda _: None,
    *,
    sign_key: str | Signer | None = None,
) -> Manifest:
    """Publish an exported folder under a channel again, byte for byte, as a new version of a new epoch. A channel that
    is given by its root is made if need be, once the folder was found right, and signs by `sign_key` if there is one.

    The new version keeps the number where that is free, and kind, step, metadata and content digest always; where
    it came from is recorded in `metadata["imported_from"]`. Every file is verified before anything is claimed, and
    again while it is copied: `progress` sees each byte twice. A trainer's state is not in an export, and so not in the
    new version.
    """
    old = _check_export(folder, progress)
    check_space(open_store(channel) if isinstance(channel, str) else channel.store, old.nbytes)
    channel = Channel.create(channel, sign_key=sign_key) if isinstance(channel, str) else channel
    epoch = channel.claim_epoch(run_id)
    origin = {"channel_id": old.channel_id, "version": old.id.label, "run_id": old.run_id}
    metadata = {**old.metadata, "imported_from": origin}
    new = msgspec.structs.replace(old, run_id=run_id, metadata=metadata, trainer_state=())
    return _publish_again(channel, epoch, new, LocalStore(folder), "", progress)


def compact(
    channel: Channel,
    manifest: Manifest,
    run_id: str = "",
    progress: Callable[[int], None] = lambda _: None,
    *,
    damaged: Mapping[VersionId, str] = {},
) -> Manifest:
    """A full version with the content of a delta version, made from its chain: no trainer is needed, and none may run.

    It is a new version of a new epoch that goes on from `manifest`: whoever publishes to the channel is fenced, and
    live versions after `manifest` are left behind. Readers that have `manifest` fetch nothing. Returns `manifest`
    itself if it is full already, and not in `damaged`, the versions whose shards are not to be read. BrokenChain if it
    cannot be rebuilt, StoreFull if there is no room for it; nothing is claimed then. So every file is rebuilt and
    verified before anything is claimed, and again while it is copied, in constant memory: `progress` sees each byte
    twice.
    """
    if manifest.kind != "delta" and manifest.id not in damaged:
        return manifest
    with leased(channel, manifest.id, "compact"), whole(channel, manifest, damaged=damaged) as (store, full):
        check_space(channel.store, full.nbytes)
        with naming_damage(channel, manifest):  # a claim fences the trainer, whatever comes of it
            check_files(store, full, progress, prefix=f"{full.folder}/")
        epoch = channel.claim_epoch(run_id or manifest.run_id, manifest.id)
        base = Parent(epoch=manifest.epoch, number=manifest.number, content_digest=manifest.content_digest)
        new = msgspec.structs.replace(full, number=manifest.number + 1, parent=base, trainer_state=())
        return _publish_again(channel, epoch, new, store, f"{full.folder}/", progress, manifest)


def _publish_again(
    channel: Channel,
    epoch: Epoch,
    old: Manifest,
    source: Store,
    prefix: str,
    progress: Callable[[int], None],
    made_from: Manifest | None = None,
) -> Manifest:
    """The files of a full version under a new identity, verified while they are copied. `made_from`: the version of
    the same channel that has these weights."""
    new = msgspec.structs.replace(
        old,
        format=FORMAT,
        data_of=msgspec.UNSET,
        previous=epoch.resumed_from or msgspec.UNSET,
        channel_id=channel.channel_id,
        epoch=epoch.number,
        number=max(old.number, epoch.next_number),
        nonce=epoch.nonce,
    )
    sealed, data = channel.seal(new, source=made_from)
    for name, file in sealed.files():
        copy_verified(
            source, f"{prefix}{name}", channel.store, f"{sealed.folder}/{name}", file, sealed.digest, progress
        )
    put_bytes(channel.store, f"{sealed.folder}/{SELF_COPY}", data)
    return channel.commit(epoch, sealed)
