"""Readers of `weight_vNNNNNN/` folders, written anew from what other stacks publish of the layout, with nothing of ours.

| reader | layout from |
|---|---|
| Pull | slime `docs/en/advanced/delta-weight-sync.md` and `docker/patch/latest/sglang-pull_weights.patch` (624b824a); miles has the writer (31f1ca96, `.../update_weight_from_distributed/delta.py`) and the same engine; SGLang `srt/weight_sync/local_checkpoint.py` (81da301c) |
| PullByIndex | vime `docker/patch/latest/vllm-pull_weights.patch` (8c1c944b) |
| ApplyByText | slime `slime/utils/disk_delta.py` before the engine pulled by itself |
| stitch_version | stitch `src/stitch/types.py` (a250dc30): which kind of version a folder is, and what has to be there of it |
| staged_by_stitch | its engine, modal-projects/sglang `python/sglang/srt/weight_sync/delta_checkpoint.py` (d631f50c) |
"""  # noqa: E501

from __future__ import annotations

import json
import os
import shutil
import struct
from typing import NamedTuple

import blake3
import numpy as np
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"
PIECE = 2 << 20
HASHES = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3.blake3}


class Place(NamedTuple):
    file: str
    offset: int
    nbytes: int


def named(number: int) -> str:
    return f"weight_v{number:06d}"


def metadata_of(folder: str) -> dict[str, str]:
    with open(os.path.join(folder, INDEX)) as file:
        return json.load(file)["metadata"]


def header_of(path: str) -> tuple[dict, int]:
    """The JSON header, and where the data start."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)), 8 + length


def shards_in(folder: str) -> list[str]:
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".safetensors"))


def places_in(paths: list[str]) -> dict[str, Place]:
    found = {}
    for path in paths:
        header, start = header_of(path)
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = Place(path, start + begin, end - begin)
    return found


class Pull:
    """`/pull_weights`: a checkpoint on this host that is brought to published versions, number by number."""

    state = ".weight_sync"

    def __init__(self, local: str, base: str, source: str) -> None:
        self.local, self.base, self.source = local, base, source
        os.makedirs(os.path.join(local, self.state), exist_ok=True)

    def pull(self, target: int) -> None:
        applied = self.applied()
        floor, start = applied or 0, target
        while start > floor and self.is_delta(start):
            start -= 1
        if applied is None or start > applied:
            self.copy(os.path.join(self.source, named(start)) if start else self.base, start)
        else:
            start = applied
        for number in range(start + 1, target + 1):
            self.apply(os.path.join(self.source, named(number)))

    def applied(self) -> int | None:
        try:
            with open(os.path.join(self.local, self.state, "state.json")) as file:
                return int(json.load(file)["version"])
        except FileNotFoundError:
            return None

    def mark(self, number: int) -> None:
        with open(os.path.join(self.local, self.state, "state.json"), "w") as file:
            json.dump({"version": f"{number:06d}"}, file)

    def is_delta(self, number: int) -> bool:
        folder = os.path.join(self.source, named(number))
        if not os.path.isdir(folder):
            raise FileNotFoundError(folder)
        return os.path.exists(os.path.join(folder, INDEX)) and "delta_encoding" in metadata_of(folder)

    def copy(self, folder: str, number: int) -> None:
        """A full version: the files at the top of its folder, and no other ones."""
        names = {entry.name for entry in os.scandir(folder) if entry.is_file()}
        for entry in [entry for entry in os.scandir(self.local) if entry.is_file() and entry.name not in names]:
            os.remove(entry.path)
        for name in names:
            shutil.copyfile(os.path.join(folder, name), os.path.join(self.local, name))
        self.mark(number)

    def shards(self) -> list[str]:
        return shards_in(self.local)

    def check_order(self, said: dict[str, str]) -> bool:
        """Whether there is anything to do."""
        applied = self.applied()
        if applied == int(said["version"]):
            return False
        if applied != int(said["base_version"]):
            raise RuntimeError(f"out of order: at {applied}, and this builds on {said['base_version']}")
        return True

    def apply(self, folder: str) -> None:
        said = metadata_of(folder)
        if not self.check_order(said):
            return
        assert (said["compression_format"], said["delta_encoding"]) == ("zstd", "xor")
        places = places_in(self.shards())
        for path in shards_in(folder):
            header, _ = header_of(path)
            for name, place in places_in([path]).items():
                change(places[name], bytes_at(place), said["checksum_format"], header["__metadata__"][name])
        self.mark(int(said["version"]))


class PullByIndex(Pull):
    """vime's: of the checkpoint on this host it looks at the shards that its index names, and needs each of them."""

    def shards(self) -> list[str]:
        with open(os.path.join(self.local, INDEX)) as file:
            return [os.path.join(self.local, name) for name in sorted(set(json.load(file)["weight_map"].values()))]


class ApplyByText(Pull):
    """slime's first: versions are the six digits, compared as text, on top of a base that is copied once as 000000."""

    state = ".delta_sync"

    def pull(self, target: int) -> None:
        if self.applied() is None:
            self.copy(self.base, 0)
        for number in range((self.applied() or 0) + 1, target + 1):
            self.apply(os.path.join(self.source, named(number)))

    def check_order(self, said: dict[str, str]) -> bool:
        with open(os.path.join(self.local, self.state, "state.json")) as file:
            applied = json.load(file)["version"]
        if applied not in (said["version"], said["base_version"]):
            raise RuntimeError(f"out of order: at {applied!r}, and this builds on {said['base_version']!r}")
        return applied != said["version"]


def change(place: Place, frame: bytes, algorithm: str, digest: str) -> None:
    """The frame over the tensor where it lies, piece by piece; proven by the digest of the result."""
    state, done = HASHES[algorithm](), 0
    memory = np.memmap(place.file, np.uint8, "r+", place.offset, (place.nbytes,))
    with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
        while done < place.nbytes and (piece := reader.read(min(PIECE, place.nbytes - done))):
            memory[done : done + len(piece)] ^= np.frombuffer(piece, np.uint8)
            state.update(memory[done : done + len(piece)].tobytes())
            done += len(piece)
    memory.flush()
    if done != place.nbytes or state.hexdigest() != digest:
        raise RuntimeError(f"checksum mismatch in {place.file} after {done} of {place.nbytes} bytes")


class StitchVersion(NamedTuple):
    """What stitch takes from a version's folder."""

    identity: str
    kind: str
    files: list[str]


def stitch_version(folder: str, run_id: str) -> StitchVersion:
    """KeyError for a folder whose index does not say its version."""
    with open(os.path.join(folder, INDEX)) as file:
        index = json.load(file)
    said = index["metadata"]
    kind = "delta" if said.get("delta_encoding") else "full"
    return StitchVersion(f"{run_id}/{named(int(said['version']))}", kind, sorted(set(index["weight_map"].values())))


def staged_by_stitch(base: str, source: str, target: int) -> dict[str, bytes]:
    """The tensors of `target` in memory: the newest full version's, or the base's, with every delta since over them.

    Stricter than the others: an index is needed everywhere and has exactly the tensors of its files, nothing follows
    the last tensor in a file, or the tensor's last byte in a frame.
    """
    start = target
    while start and "delta_encoding" in index_of(os.path.join(source, named(start)))["metadata"]:
        start -= 1
    root = os.path.join(source, named(start)) if start else base
    whole = index_of(root)["weight_map"]
    places = places_in([os.path.join(root, name) for name in sorted(set(whole.values()))])
    image = {name: bytearray(bytes_at(place)) for name, place in places.items()}
    last = {}
    for number in range(start + 1, target + 1):
        folder = os.path.join(source, named(number))
        index = index_of(folder)
        said = index["metadata"]
        assert (int(said["base_version"]), said["compression_format"]) == (number - 1, "zstd")
        for name, place in places_of_files(folder, index["weight_map"]).items():
            assert name in whole, f"{name} is absent from the full checkpoint"
            unpack_over(image[name], bytes_at(place))
            last[name] = HASHES[said["checksum_format"]], header_of(place.file)[0]["__metadata__"][name]
    for name, (algorithm, digest) in last.items():
        assert algorithm(bytes(image[name])).hexdigest() == digest, f"checksum mismatch in {name}"
    return {name: bytes(data) for name, data in image.items()}


def index_of(folder: str) -> dict:
    with open(os.path.join(folder, INDEX)) as file:
        index = json.load(file)
    assert index["weight_map"] or index["metadata"].get("delta_encoding"), "a full checkpoint with an empty weight map"
    return index


def places_of_files(folder: str, weight_map: dict[str, str]) -> dict[str, Place]:
    found = {}
    for file in sorted(set(weight_map.values())):
        path = os.path.join(folder, file)
        places = places_in([path])
        assert places.keys() == {name for name, where in weight_map.items() if where == file}, "blob and index differ"
        assert max(place.offset + place.nbytes for place in places.values()) == os.path.getsize(path)
        found.update(places)
    return found


def bytes_at(place: Place) -> bytes:
    with open(place.file, "rb") as file:
        file.seek(place.offset)
        return file.read(place.nbytes)


def unpack_over(image: bytearray, frame: bytes) -> None:
    with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
        change = np.frombuffer(reader.read(len(image)), np.uint8)
        assert not reader.read(1), "more bytes than the tensor has"
    np.frombuffer(image, np.uint8)[:] ^= change
