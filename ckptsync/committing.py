"""The commit point itself: one create-if-absent, and who has won it."""

from __future__ import annotations

from .errors import AlreadyExists, BadManifest, NotFound, StoreUnavailable, VersionExists, VersionNotFound
from .layout import manifest_path
from .manifest import MAX_BYTES, Manifest, decode
from .store.base import Store, read_bytes
from .version import VersionId


def create_manifest(store: Store, manifest: Manifest) -> Manifest:
    """The manifest that is there afterwards: the one given, or on a retry one with the same content. VersionExists for
    another one. After an error nothing is known to be committed, and trying again is safe."""
    path, data = manifest_path(manifest.id), manifest.encoded
    if not manifest.validated:
        decode(data, expect=manifest.id)
    try:
        store.create(path, data)
    except AlreadyExists:
        return _settle(store, manifest)
    except StoreUnavailable:
        # The answer was lost, not necessarily the write: only a read can tell.
        try:
            return _settle(store, manifest)
        except VersionNotFound:
            pass
        raise
    return _settle(store, manifest)


def _settle(store: Store, mine: Manifest) -> Manifest:
    """Who owns the identity now? Read back after every create: some mounts let two creators both win."""
    try:
        data = read_bytes(store, manifest_path(mine.id), MAX_BYTES)
        found = mine if data == mine.encoded else decode(data, expect=mine.id)
    except NotFound as error:
        raise VersionNotFound(f"{mine.id} is not there after its commit") from error
    except BadManifest as error:
        raise in_the_way(store, mine.id, error) from error
    if found.nonce == mine.nonce or found.content_digest == mine.content_digest:
        return found
    raise VersionExists(
        f"{mine.id} is already published by run {found.run_id} with other content; versions are immutable: "
        "publish under the next number"
    )


def in_the_way(store: Store, version: VersionId, error: BadManifest) -> BadManifest:
    """The same, with what to do: a file that is torn, or somebody else's, has a name that a commit needs."""
    path = f"{store.url}/{manifest_path(version)}"
    return BadManifest(
        f"{path} is in the way, and no version: {error}. If it stays so, delete it and try again; a trainer that is "
        "started anew goes on after it"
    )
