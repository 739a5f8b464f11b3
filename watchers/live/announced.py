"""The staged version that a watcher announced to a rank: a folder's name and a digest."""

from __future__ import annotations

import os

from ckptsync.engine import StagedVersion
from ckptsync.errors import BadManifest, EngineRefused
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import MAX_BYTES, decode


def announced(folder: str, manifest_digest: str) -> StagedVersion:
    """The version in the folder. EngineRefused if it cannot be read here, BadManifest if it is another one."""
    path = os.path.join(folder, SELF_COPY)
    try:
        with open(path, "rb") as file:
            manifest = decode(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise EngineRefused(f"{path} cannot be read on this rank's host: {error}") from error
    if manifest.manifest_digest != manifest_digest:
        raise BadManifest(f"{path} is another version's manifest than the one announced")
    return StagedVersion(manifest=manifest, folder=folder)
