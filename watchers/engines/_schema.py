"""What an engine needs, read from the checkpoint it was started with: names, dtypes and shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckptsync.engine import StagedVersion
from ckptsync.errors import Corrupt, EngineRefused, NotFound
from ckptsync.manifest import TensorSpec
from ckptsync.shards.hf_folder import scan_checkpoint


class SchemaMemory:
    """The schema of an engine, read once per boot.

    At the first look: the folder may be gone later, and its schema is still the one that the engine needs.
    """

    def __init__(self) -> None:
        self._boots: dict[str, Mapping[str, TensorSpec] | None] = {}

    def get(self, boot_id: str, model_path: str) -> Mapping[str, TensorSpec] | None:
        if boot_id not in self._boots:
            self._boots = {boot_id: folder_schema(model_path)}
        return self._boots[boot_id]


def folder_schema(folder: str) -> dict[str, TensorSpec] | None:
    """name -> spec of a local checkpoint's tensors; None for what cannot be read here: a hub id, a relative
    path, a folder of another host."""
    if not os.path.isabs(folder):
        return None
    try:
        return scan_checkpoint(folder).tensors
    except (NotFound, Corrupt, OSError):
        return None


def refuse_adapter(version: StagedVersion, engine: str) -> None:
    """EngineRefused for an adapter version: loaded as weights, its folder would leave an engine without any."""
    if version.manifest.kind == "adapter":
        raise EngineRefused(
            f"start: {version.label} is a LoRA adapter and {engine} is followed for full weights: use AdapterEngine"
        )


def refuse_torn(version: StagedVersion) -> None:
    """EngineRefused if a staged file lost its length since it was verified: some engines die of that."""
    for track in version.manifest.tracks.values():
        for file in track.files:
            path = os.path.join(version.folder, file.name)
            if not os.path.isfile(path) or os.path.getsize(path) != file.size:
                raise EngineRefused(f"start: {version.folder} is not whole: {file.name} is not of {file.size} bytes")
