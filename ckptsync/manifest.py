"""The commit record as data: parse, validate, canonical bytes.

A version exists exactly when its manifest does. What does not parse or validate counts as *incomplete*: readers
skip it with one warning and never raise in their loop. Nothing in here touches a store.

The JSON is canonical (UTF-8, sorted keys, no NaN) and carries its own sha256, so a torn or edited manifest is
told by itself. Unknown fields are kept out of the parsed record but are covered by the digest, so a later
release may add some.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from .canary import Canary
from .canonical import canonical
from .digest import sha256
from .errors import BadManifest, InvalidName, UnsupportedFormat
from .safetensors_format import DTYPE_BITS
from .version import VersionId

FORMAT = 1
SHARED_FORMAT = 2
"""Of a version that shares the data of an earlier one. A reader that knows only format 1 would look for them where
they are not: it refuses the manifest and stays on what it has."""

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


class Track(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One model of a version. Most versions have one track, named `model`."""

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    model: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @functools.cached_property
    def by_file(self) -> Mapping[str, Sequence[TensorEntry]]:
        """File name -> the tensors in it. Made once: every file of a version is looked at with its tensors."""
        found: dict[str, list[TensorEntry]] = {}
        for tensor in self.tensors:
            found.setdefault(tensor.file, []).append(tensor)
        return found


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a delta is taken against, and the delta's files by track; see `delta_path`."""

    epoch: int
    number: int
    content_digest: str
    files: dict[str, tuple[FileEntry, ...]] = {}

    @property
    def id(self) -> VersionId:
        return VersionId(self.epoch, self.number)

    @property
    def nbytes(self) -> int:
        return sum(file.size for files in self.files.values() for file in files)


class Parent(Base, frozen=True, kw_only=True):
    """The version before, and what else a version has of deltas."""

    skips: tuple[Base, ...] = ()
    """Older versions with a delta of their own, for readers that are far behind."""

    stored: tuple[str, ...] = ()
    """Of a version that is a delta: those of its tracks' files that lie in its folder all the same. All others are
    shards, which are rebuilt, or equal in every base."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The version whose data folder another one shares: a rollback copies nothing."""

    epoch: int
    number: int
    nonce: str

    @property
    def id(self) -> VersionId:
        return VersionId(self.epoch, self.number)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
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

    canary: Canary | msgspec.UnsetType = msgspec.UNSET
    """What the version says to a probe prompt. Unset is absent from the JSON: a manifest without one, by whichever
    release, is the same bytes when it is written out again."""

    data_of: Origin | msgspec.UnsetType = msgspec.UNSET
    """Where its files lie, if not in a folder of its own (format 2)."""

    previous: VersionId | msgspec.UnsetType = msgspec.UNSET
    """The version before it on its line, so that a reader of every version knows when one is missing."""

    manifest_digest: str = ""

    @property
    def id(self) -> VersionId:
        return VersionId(self.epoch, self.number)

    @property
    def encoded(self) -> bytes:
        """The bytes that `decode` read, which its digest is over: with fields of other releases, and without theirs
        that are missing. Of one that was made here, canonical JSON."""
        stored: bytes | None = self.__dict__.get("stored")
        return stored if stored is not None else canonical(msgspec.to_builtins(self))

    @property
    def validated(self) -> bool:
        """Whether it came out of `decode`, which takes seconds for 200,000 tensors, and is what `encoded` says."""
        return "stored" in self.__dict__

    @property
    def signed(self) -> bool:
        """Whether what `decode` read has a signature, of whomever: `signing.Trust` says what it is worth."""
        return bool(self.__dict__.get("is_signed"))

    @property
    def folder(self) -> str:
        """The data folder, relative to the root: unique to the attempt, never written again."""
        if isinstance(self.data_of, Origin):
            return data_folder(self.data_of.id, self.data_of.nonce)
        return data_folder(self.id, self.nonce)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole version, as an engine loads it."""
        return sum(track.nbytes for track in self.tracks.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes in its own folder, without the trainer state."""
        return sum(file.size for _, file in self.stored_files())

    @property
    def deltas(self) -> tuple[Base, ...]:
        """Every base that this version can be made from, with the files that it takes."""
        return (self.parent, *self.parent.skips) if self.parent else ()

    def full_form(self) -> Manifest:
        """The same version as a full one. A delta version lists the files that a full publish would have made."""
        if self.parent is None:
            return self
        return seal(msgspec.structs.replace(self, kind="full", parent=None))[0]

    def stored_files(self) -> Iterator[tuple[str, FileEntry]]:
        """(path inside the data folder, entry) of every file that lies there, but for the trainer state."""
        here = None if self.kind != "delta" or self.parent is None else set(self.parent.stored)
        yield from ((path, file) for path, file in self.files() if here is None or path in here)
        for base in self.deltas:
            for track, files in base.files.items():
                yield from ((delta_path(base.id, track, file.name), file) for file in files)

    def files(self) -> Iterator[tuple[str, FileEntry]]:
        """(path inside the data folder, entry) of every file of every track."""
        for name, track in self.tracks.items():
            for file in track.files:
                yield (file.name if name == MAIN_TRACK else f"{name}/{file.name}"), file


MAIN_TRACK = "model"
"""Its files lie directly in the data folder, so that the folder is a plain Hugging Face checkpoint."""


def delta_path(base: VersionId, track: str, name: str) -> str:
    """Where a file of the delta against `base` lies inside the data folder."""
    return f"delta/{base.stem}/{name if track == MAIN_TRACK else f'{track}/{name}'}"


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


def seal(manifest: Manifest) -> tuple[Manifest, bytes]:
    """The manifest with its own digest set, and the bytes to store. Validates what it seals."""
    body = msgspec.to_builtins(manifest)
    del body["manifest_digest"]
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
    signed = raw.pop("signature", None) is not None
    if sha256(msgspec.json.encode(raw, order="sorted")) != claimed:
        raise BadManifest("the manifest's own digest does not match its content: torn or edited")
    try:
        manifest = msgspec.convert({**raw, "manifest_digest": claimed}, Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadManifest(f"the manifest does not have the right fields: {error}") from error
    _validate(manifest, expect)
    manifest.__dict__.update(stored=bytes(data), is_signed=signed)
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
    if found not in (FORMAT, SHARED_FORMAT) or isinstance(found, bool):
        raise UnsupportedFormat(
            f"manifest format {found!r} is not {FORMAT} or {SHARED_FORMAT}: written by another release of ckptsync?"
        )


def _validate(manifest: Manifest, expect: VersionId | None) -> None:
    if expect is not None and manifest.id != expect:
        raise BadManifest(f"the file is named {expect.stem} but the manifest says {manifest.id.stem}")
    if manifest.epoch < 1 or manifest.number < 0 or not manifest.tracks:
        raise BadManifest("epoch, number or tracks are out of range")
    _validate_origin(manifest)
    try:
        check_basename(manifest.nonce, "nonce")
        if isinstance(manifest.data_of, Origin):
            check_basename(manifest.data_of.nonce, "nonce")
        for name, track in manifest.tracks.items():
            check_basename(name, "track")
            _validate_track(track)
        _validate_track(Track(files=manifest.trainer_state, tensors=()))
        _validate_deltas(manifest)
    except InvalidName as error:
        raise BadManifest(str(error)) from error
    if combined_content(manifest.tracks) != manifest.content_digest:
        raise BadManifest("the content digest does not follow from the tensors listed")


def _validate_deltas(manifest: Manifest) -> None:
    if manifest.kind == "delta" and manifest.parent is None:
        raise BadManifest("a delta without a parent")
    for base in manifest.deltas:
        if base.id >= manifest.id or not base.files.keys() <= manifest.tracks.keys():
            raise BadManifest(f"a delta against {base.id}, which cannot be its base")
        for files in base.files.values():
            _validate_track(Track(files=files, tensors=()))
    if manifest.parent and not set(manifest.parent.stored) <= {path for path, _ in manifest.files()}:
        raise BadManifest("a file is stored that is in no track")


def _validate_origin(manifest: Manifest) -> None:
    origin = manifest.data_of if isinstance(manifest.data_of, Origin) else None
    if (origin is not None) != (manifest.format == SHARED_FORMAT):
        raise BadManifest(f"format {manifest.format} and data_of {origin} do not go together")
    if origin is not None and (origin.id >= manifest.id or min(origin.id) < 0):
        raise BadManifest(f"its data cannot be those of {origin.id}")


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
