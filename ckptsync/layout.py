"""Where things lie below a channel's root. See docs/format.md."""

from __future__ import annotations

import re

from .manifest import FileEntry, Manifest, check_basename
from .version import VersionId, parse_stem

CHANNEL = "channel.json"
HEAD = "head.json"
SENT = "sent.json"
"""The newest version that a trainer began to bring to engines without files: whose label that is, says a watcher."""

MIRROR = "mirror.json"
"""Says that the root is a copy of another one, and of which: it has no publisher."""

MANIFESTS = "manifests"
EPOCHS = "epochs"
DATA = "data"
RECEIPTS = "receipts"
LEASES = "leases"
PINS = "pins"
COLLECTED = "collected"
COLLECTOR = "collector"
SELF_COPY = "ckptsync.json"
"""A copy of the manifest inside the data folder: the folder explains itself when copied away."""

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""What an adapter version's folder holds: a PEFT directory."""

TRAINER = "trainer"
"""Folder of the trainer state inside a version's data folder."""

_CLAIM = re.compile(r"e(\d{4,9})\.json", re.ASCII)


def manifest_path(version: VersionId) -> str:
    return f"{MANIFESTS}/{version.stem}.json"


def trainer_files(manifest: Manifest) -> list[tuple[str, FileEntry]]:
    """(path inside the data folder, entry) of the trainer state's files, as `Manifest.files` gives the tracks'."""
    return [(f"{TRAINER}/{file.name}", file) for file in manifest.trainer_state]


def claim_path(epoch: int) -> str:
    return f"{EPOCHS}/e{epoch:04d}.json"


def receipt_path(reader: str) -> str:
    return f"{RECEIPTS}/{check_basename(reader, 'reader')}.json"


def lease_path(reader: str) -> str:
    return f"{LEASES}/{check_basename(reader, 'reader')}.json"


def pin_path(version: VersionId) -> str:
    return f"{PINS}/{version.stem}.json"


def collected_path(version: VersionId) -> str:
    """The note of a version that is being collected, from before its manifest goes until its data are gone."""
    return f"{COLLECTED}/{version.stem}.json"


def version_of(path: str) -> VersionId | None:
    """The version that `manifests/e0001-v00000042.json` commits, or a pin or note of that name speaks of; None for any
    other file found there."""
    name = path.rpartition("/")[2]
    return parse_stem(name[:-5]) if name.endswith(".json") else None


def epoch_of(path: str) -> int | None:
    """The epoch that `epochs/e0001.json` claims; None for any other file."""
    match = _CLAIM.fullmatch(path.rpartition("/")[2])
    return int(match[1]) if match else None
