"""Where things lie below a channel's root. See docs/format.md."""

from __future__ import annotations

import re

from .manifest import check_basename
from .version import VersionId, parse_stem

CHANNEL = "channel.json"
HEAD = "head.json"
MANIFESTS = "manifests"
EPOCHS = "epochs"
DATA = "data"
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


def claim_path(epoch: int) -> str:
    return f"{EPOCHS}/e{epoch:04d}.json"


def receipt_path(reader: str) -> str:
    return f"receipts/{check_basename(reader, 'reader')}.json"


def lease_path(reader: str) -> str:
    return f"leases/{check_basename(reader, 'reader')}.json"


def version_of(path: str) -> VersionId | None:
    """The version that `manifests/e0001-v00000042.json` commits; None for any other file found there."""
    name = path.rpartition("/")[2]
    return parse_stem(name[:-5]) if name.endswith(".json") else None


def epoch_of(path: str) -> int | None:
    """The epoch that `epochs/e0001.json` claims; None for any other file."""
    match = _CLAIM.fullmatch(path.rpartition("/")[2])
    return int(match[1]) if match else None
