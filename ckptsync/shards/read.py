"""Read a safetensors header from untrusted bytes, without torch and without the safetensors package.

Every number is checked against the file's size before anything is allocated by it, and the file must be
covered exactly: parsers that differ over holes, trailing bytes or a key given twice would load different
weights from one file. Only BadShard comes out (and the store's own errors).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from ..errors import BadShard, InvalidInput
from ..manifest import FileEntry, TensorSpec, Track
from ..safetensors_format import MAX_HEADER
from ..store.base import Reader
from .file import FileReader
from .json_object import parse_object
from .plan import check_specs


class StoredTensor(NamedTuple):
    """A tensor's spec, and where its `spec.nbytes` bytes start, counted from the start of the file."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a shard says of itself. `tensors` is in file order."""

    tensors: dict[str, StoredTensor]
    data_start: int
    size: int
    """Bytes of the whole file."""

    metadata: dict[str, str]


def read_header(source: Reader | str, *, name: str = "", follow_symlinks: bool = False) -> Header:
    """The header of a shard, from an open store file or a local path.

    Costs two small reads. Memory is bounded by the header, which is at most 100 MB and never longer than the
    file: about 10 times for a good one, 26 times for the worst that was found. `name` is what errors call
    an open file. BadShard for everything that is not exactly a safetensors file.
    """
    with opened(source, follow_symlinks=follow_symlinks) as reader:
        where = name or getattr(reader, "path", "shard")
        try:
            return _read(reader)
        except BadShard as error:
            raise error if where in str(error) else BadShard(f"{where}: {error}") from error


@contextmanager
def opened(source: Reader | str, *, follow_symlinks: bool = False) -> Iterator[Reader]:
    """`source` itself, which stays open, or the file at that path, which is closed afterwards."""
    if not isinstance(source, str):
        yield source
        return
    reader = FileReader(source, follow_symlinks=follow_symlinks)
    try:
        yield reader
    finally:
        reader.close()


def _read(reader: Reader) -> Header:
    size = reader.size
    if size < 10:
        raise BadShard(f"a file of {size} bytes cannot be safetensors: expected a length and a header")
    length = int.from_bytes(_read_exactly(reader, 0, 8), "little")
    if length > MAX_HEADER:
        raise BadShard(f"says its header has {length} bytes, where the format allows {MAX_HEADER}")
    if 8 + length > size:
        raise BadShard(f"truncated: the header would end at byte {8 + length} of {size}")
    metadata, entries = _parse(_read_exactly(reader, 8, length))
    return Header(_place(entries, 8 + length, size), 8 + length, size, metadata)


def _read_exactly(reader: Reader, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    reader.readinto(offset, memoryview(data))
    return data


_Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Offset, ...], msgspec.Meta(max_length=64)]
    data_offsets: tuple[_Offset, _Offset]


def _parse(text: bytearray) -> tuple[dict[str, str], dict[str, _Entry]]:
    if text[:1] != b"{":
        raise BadShard("the header does not begin with '{'")
    raw = parse_object(text)
    try:
        metadata = msgspec.convert(raw.pop("__metadata__", None), dict[str, str] | None)
        return metadata or {}, msgspec.convert(raw, dict[str, _Entry])
    except msgspec.ValidationError as error:
        raise BadShard(f"the header is not that of a safetensors file: {error}") from error


def _place(entries: dict[str, _Entry], data_start: int, size: int) -> dict[str, StoredTensor]:
    """The tensors in file order, if they cover the data exactly: no hole, no overlap, no trailing byte."""
    tensors = {}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        spec = TensorSpec(name, entry.dtype, entry.shape)
        begin, end = entry.data_offsets
        _check_spec(spec)
        if begin != position:
            raise BadShard(f"tensor {name!r} starts at byte {begin} of the data, where {position} was expected")
        if end - begin != spec.nbytes:
            kind = f"{spec.dtype}{list(spec.shape)}"
            raise BadShard(f"tensor {name!r} has {end - begin} bytes, but {kind} needs {spec.nbytes}")
        tensors[name] = StoredTensor(spec, data_start + begin)
        position = end
    if data_start + position != size:
        raise BadShard(f"the tensors end at byte {data_start + position}, but the file at {size}")
    return tensors


def _check_spec(spec: TensorSpec) -> None:
    try:
        check_specs([spec])
    except InvalidInput as error:
        raise BadShard(str(error)) from error


def check_header(header: Header, file: FileEntry, track: Track) -> None:
    """BadShard unless the shard holds exactly the tensors that the manifest's track lists in `file`."""
    if header.size != file.size:
        raise BadShard(f"{file.name} has {header.size} bytes, where the manifest says {file.size}")
    expected = {tensor.name: tensor.spec for tensor in track.by_file.get(file.name, ())}
    if missing := expected.keys() - header.tensors.keys():
        raise BadShard(f"{file.name} lacks {some(missing)}")
    if extra := header.tensors.keys() - expected.keys():
        raise BadShard(f"{file.name} holds {some(extra)}, not in the manifest")
    for name, want in expected.items():
        found = header.tensors[name].spec
        if found != want:
            raise BadShard(
                f"{file.name}: tensor {name!r} is {found.dtype}{list(found.shape)}, "
                f"where the manifest says {want.dtype}{list(want.shape)}"
            )


def some(names: Iterable[str], limit: int = 3) -> str:
    """The first few names and how many more, for messages."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(map(repr, ordered[:limit])) + more
