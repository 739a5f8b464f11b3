"""The commit record as data: parse, validate, canonical bytes.

A version exists exactly when its manifest does. What does not parse or validate counts as *incomplete*: readers
skip it with one warning and never raise in their loop. Nothing in here touches a store.

The JSON is canonical (UTF-8, sorted keys, no NaN) and carries its own sha256, so a torn or edited manifest is
told by itself. Unknown fields are kept out of the parsed record but are covered by the digest, so a later
release may add some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from .digest import sha256
from .errors import BadManifest, InvalidName, UnsupportedFormat
from .safetensors_format import DTYPE_BITS
from .version import VersionId

FORMAT = 1
MAX_BYTES = 512 << 20
"""A manifest larger than this is refused before it is read (a 200,000-tensor MoE needs about 40 MiB)."""

MAX_RANK = 64
Kind = Literal["full", "delta", "adapter"]


class TensorSpec(msgspec.Struct, frozen=True, order=True):
    """What an engine or a plan needs to know of a tensor. `dtype` is the safetensors name, e.g. `BF16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return (math.prod(self.shape) * DTYPE_BITS[self.dtype] + 7) // 8


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of a version. `digest` is over its little-endian contiguous bytes.

    A tied tensor has `alias_of` set to the name whose bytes it shares; with policy `omit` its `file` is empty,
    since the bytes are stored once under the other name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    file: str = ""
    alias_of: str = ""

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.dtype, self.shape)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One data file: plain relative name, size in bytes, digest over all its bytes."""

    name: str
    size: int
    digest: str


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a version. Most versions have one track, named `model`."""

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    model: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The version that a delta is taken against."""

    epoch: int
    number: int
    content_digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The commit record. Build one with `seal`, read one with `decode`."""

    format: int = FORMAT
    channel_id: str
    epoch: int
    number: int
    nonce: str
    run_id: str
    kind: Kind = "full"
    parent: Parent | None = None
    created: float
    producer: dict[str, Any] = {}
    step: int | None = None
    metadata: dict[str, Any] = {}
    digest: str
    content_digest: str
    tracks: dict[str, Track]
    trainer_state: tuple[FileEntry, ...] = ()
    """Files below `trainer/` in the data folder: optimizer and the like, for trainers only. Not part of
    `content_digest`, `nbytes` and `files`, since no engine needs them."""

    manifest_digest: str = ""

    @property
    def id(self) -> VersionId:
        return VersionId(self.epoch, self.number)

    @property
    def folder(self) -> str:
        """The data folder, relative to the root: unique to the attempt, never written again."""
        return data_folder(self.id, self.nonce)

    @property
    def nbytes(self) -> int:
        return sum(track.nbytes for track in self.tracks.values())

    def files(self) -> Iterator[tuple[str, FileEntry]]:
        """(path inside the data folder, entry) of every file of every track."""
        for name, track in self.tracks.items():
            for file in track.files:
                yield (file.name if name == MAIN_TRACK else f"{name}/{file.name}"), file


MAIN_TRACK = "model"
"""Its files lie directly in the data folder, so that the folder is a plain Hugging Face checkpoint."""


def data_folder(version: VersionId, nonce: str) -> str:
    return f"data/{version.stem}-{nonce}"


def check_basename(name: str, what: str = "file") -> str:
    """The name itself, if it is a plain relative basename on every system; else InvalidName.

    Checked before any open: a manifest or an index is untrusted, and `../x` or `C:\\x` would read any file.
    """
    if not name or name in {".", ".."} or len(name.encode("utf-8", "surrogatepass")) > 255:
        raise InvalidName(f"{what} name {name!r} is empty, too long or not a name")
    if any(c in "/\\:\0" or ord(c) < 32 or 0xD800 <= ord(c) <= 0xDFFF for c in name):
        raise InvalidName(f"{what} name {name!r} is not a plain basename")
    return name


def content_digest(tensors: Iterable[TensorEntry]) -> str:
    """sha256 over the logical state, by name: name, dtype, shape, tensor digest; ties count as tensors.

    Independent of sharding and of `kind`, so a delta and the full version that it stands for agree.
    """
    rows = sorted((t.name, t.dtype, t.shape, t.digest) for t in tensors)
    return sha256(msgspec.json.encode(rows))


def schema_digest(tensors: Iterable[TensorEntry]) -> str:
    """sha256 over names, dtypes and shapes alone: equal for versions that one engine can take in turn."""
    return sha256(msgspec.json.encode(sorted((t.name, t.dtype, t.shape) for t in tensors)))


def combined_content(tracks: Mapping[str, Track]) -> str:
    """The content digest of a version: its only track's, or a digest over the tracks' by name."""
    each = {name: content_digest(track.tensors) for name, track in tracks.items()}
    if list(each) == [MAIN_TRACK]:
        return each[MAIN_TRACK]
    return sha256(canonical(each))


def canonical(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no white space, no NaN or infinity (ValueError)."""
    _refuse_nan(value)
    return msgspec.json.encode(value, order="sorted")


def _refuse_nan(value: Any) -> None:
    # msgspec writes NaN as null, which would change the data silently.
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot be written as JSON: use a string or leave it out")
    if isinstance(value, dict):
        for item in value.values():
            _refuse_nan(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_nan(item)


def seal(manifest: Manifest) -> tuple[Manifest, bytes]:
    """The manifest with its own digest set, and the bytes to store. Validates what it seals."""
    body = msgspec.to_builtins(manifest)
    body.pop("manifest_digest", None)
    body["manifest_digest"] = sha256(canonical(body))
    data = canonical(body)
    return decode(data), data


def decode(data: bytes, expect: VersionId | None = None) -> Manifest:
    """Parse and validate untrusted bytes. Raises BadManifest or UnsupportedFormat, never anything else.

    `expect` is the identity that the file's name claims; a manifest that says otherwise is refused.
    """
    raw = _parse(data)
    _check_format(raw)
    claimed = raw.pop("manifest_digest", None)
    raw.pop("signature", None)
    if sha256(msgspec.json.encode(raw, order="sorted")) != claimed:
        raise BadManifest("the manifest's own digest does not match its content: torn or edited")
    try:
        manifest = msgspec.convert({**raw, "manifest_digest": claimed}, Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadManifest(f"the manifest does not have the right fields: {error}") from error
    _validate(manifest, expect)
    return manifest


def _parse(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise BadManifest(f"the manifest has {len(data)} bytes, more than {MAX_BYTES}")
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadManifest(f"the manifest is not complete JSON ({len(data)} bytes): {error}") from error
    if not isinstance(raw, dict):
        raise BadManifest("the manifest is not a JSON object")
    return raw


def _check_format(raw: dict[str, Any]) -> None:
    found = raw.get("format")
    if found != FORMAT or isinstance(found, bool):
        raise UnsupportedFormat(f"manifest format {found!r} is not {FORMAT}: written by another release of ckptsync?")


def _validate(manifest: Manifest, expect: VersionId | None) -> None:
    if expect is not None and manifest.id != expect:
        raise BadManifest(f"the file is named {expect.stem} but the manifest says {manifest.id.stem}")
    if manifest.epoch < 1 or manifest.number < 0 or not manifest.tracks:
        raise BadManifest("epoch, number or tracks are out of range")
    try:
        check_basename(manifest.nonce, "nonce")
        for name, track in manifest.tracks.items():
            check_basename(name, "track")
            _validate_track(track)
        _validate_track(Track(files=manifest.trainer_state, tensors=()))
    except InvalidName as error:
        raise BadManifest(str(error)) from error
    if combined_content(manifest.tracks) != manifest.content_digest and manifest.kind != "delta":
        raise BadManifest("the content digest does not follow from the tensors listed")


def _validate_track(track: Track) -> None:
    sizes = {file.name: file.size for file in track.files}
    if len(sizes) != len(track.files):
        raise BadManifest("a file is listed twice")
    for file in track.files:
        check_basename(file.name)
        if file.size < 0:
            raise BadManifest(f"{file.name}: negative size")
    names = {tensor.name for tensor in track.tensors}
    if len(names) != len(track.tensors):
        raise BadManifest("a tensor is listed twice")
    stored = dict.fromkeys(sizes, 0)
    for tensor in track.tensors:
        _validate_tensor(tensor, names, stored)
    for file_name, total in stored.items():
        if total > sizes[file_name]:
            raise BadManifest(f"{file_name}: tensors of {total} bytes in a file of {sizes[file_name]}")


def _validate_tensor(tensor: TensorEntry, names: set[str], stored: dict[str, int]) -> None:
    if tensor.dtype not in DTYPE_BITS:
        raise BadManifest(f"tensor {tensor.name!r}: unknown dtype {tensor.dtype!r}")
    if len(tensor.shape) > MAX_RANK or any(not 0 <= size < 1 << 62 for size in tensor.shape):
        raise BadManifest(f"tensor {tensor.name!r}: impossible shape")
    if tensor.alias_of and (tensor.alias_of not in names or tensor.alias_of == tensor.name):
        raise BadManifest(f"tensor {tensor.name!r} is an alias of {tensor.alias_of!r}, which is not there")
    if not tensor.file:
        if not tensor.alias_of:
            raise BadManifest(f"tensor {tensor.name!r} is in no file")
    elif tensor.file not in stored:
        raise BadManifest(f"tensor {tensor.name!r} is in {tensor.file!r}, which is not listed")
    else:
        stored[tensor.file] += tensor.spec.nbytes


def tensor_specs(track: Track) -> dict[str, TensorSpec]:
    """name -> spec of every tensor, ties included."""
    return {tensor.name: tensor.spec for tensor in track.tensors}
