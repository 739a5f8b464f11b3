"""Small manifests for tests."""

from __future__ import annotations

from typing import Any

from ckptsync.digest import digest
from ckptsync.manifest import FileEntry, Manifest, TensorEntry, Track, combined_content, seal


def tensor(name: str = "w", value: bytes = b"\0" * 8, file: str = "model.safetensors", **fields: Any) -> TensorEntry:
    row = {"name": name, "dtype": "U8", "shape": (len(value),), "digest": digest(value), "file": file}
    return TensorEntry(**{**row, **fields})


def track(*tensors: TensorEntry, size: int = 1000) -> Track:
    names = dict.fromkeys(t.file for t in tensors if t.file)
    return Track(files=tuple(FileEntry(name=n, size=size, digest="0" * 32) for n in names), tensors=tensors)


def manifest(epoch: int = 1, number: int = 1, value: bytes = b"\0" * 8, **fields: Any) -> Manifest:
    """A sealed manifest of one tensor; `value` decides its content digest."""
    tracks = fields.pop("tracks", {"model": track(tensor(value=value))})
    row: dict[str, Any] = {
        "channel_id": "c" * 32,
        "epoch": epoch,
        "number": number,
        "nonce": f"nonce{epoch}x{number}",
        "run_id": "run",
        "created": 1.5,
        "digest": "xxh3-128",
        "content_digest": combined_content(tracks),
        "tracks": tracks,
    }
    return seal(Manifest(**{**row, **fields}))[0]
