"""What travels from the adapter to each worker: a few words as one small uint8 tensor. Neither torch nor SGLang here.

`/update_weights_from_tensor` takes a pickled list of (name, tensor), which SGLang's own clients make of shared memory:
that needs torch, the same host and a daemon that outlives the call. A tensor that is spelled out needs none of them:
`torch.ByteTensor` of a list is among the few things that SGLang's unpickler lets through.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from ckptsync.errors import InvalidInput

LOADER = "watchers.sglang_plugin.loader.load"
"""As `--custom-weight-loader`, and as `load_format`."""

NAME = "ckptsync.announcement"

BASE_LABEL = "default"
"""Of an engine that has loaded nothing since its start."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """A staged version, on every rank's host."""

    folder: str
    manifest_digest: str
    label: str
    receipts: str
    """A folder where each rank says what became of it."""

    serves: str
    """The label of what the engine holds now, as it reports it."""

    mailbox: str
    """A folder where each rank is to listen from now on, for what is to be prepared; see `watchers.live.mailbox`."""


def encode(announcement: Announcement) -> str:
    """An entry of `serialized_named_tensors`: `[(NAME, torch.ByteTensor([…]))]`, pickled, in base64."""
    numbers = b"".join(b"K" + bytes([byte]) for byte in msgspec.json.encode(announcement))
    name = b"X" + struct.pack("<I", len(NAME)) + NAME.encode()
    tensor = b"ctorch\nByteTensor\n](" + numbers + b"e\x85R"
    return base64.b64encode(b"\x80\x02]" + name + tensor + b"\x86a.").decode()


def decode(named_tensors: Sequence[tuple[str, Any]]) -> Announcement:
    """What `encode` was given. InvalidInput for tensors of somebody else."""
    tensors = dict(named_tensors)
    if tensors.keys() != {NAME}:
        raise InvalidInput(f"{LOADER} takes the one tensor {NAME}, which `--engine sglang-plugin` sends: {[*tensors]}")
    try:
        return msgspec.json.decode(bytes(tensors[NAME].tolist()), type=Announcement)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"{NAME}: {error}") from error
