"""One safetensors file, written and digested in one pass over the bytes.

The format is an 8-byte length, a JSON header and the tensors back to back, so a streaming writer needs the
plan first and then holds nothing. Two things differ from the reference writer: the header is padded with
spaces so that the data starts at a multiple of 4096 (O_DIRECT reads land page-aligned, and mapped tensors
too), and the tensors lie in the plan's order.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..digest import DEFAULT, Bytes, Hasher, hasher
from ..errors import InvalidInput
from ..logs import Pool
from ..manifest import FileEntry, TensorEntry
from ..safetensors_format import MAX_HEADER
from ..store.base import Writer
from .plan import ShardPlan, check_specs

PAGE = 4096
"""The data of a shard starts at a multiple of this, so that it can be mapped and read directly."""

_CHUNK = 16 << 20
"""Bytes that are digested while the store takes them: one write of a LocalStore."""

_CACHED = 1 << 20
"""Bytes that stay in the cache from the first digest to the second. xxhash lets go of the interpreter lock; much
smaller pieces would queue for it behind the training thread."""

_SMALL = 256 << 10
"""Bytes that are digested sooner than a thread is woken for them: norms and biases, experts of small models."""


class ShardWriter:
    """Streams the tensors of one plan into a store's writer.

    `add` every tensor in the plan's order, then `finish`; on any error `abort`. Nothing is visible under the
    file's name before `finish` returns. The constructor refuses names, shapes and metadata that could not
    be read back, before it writes the first byte: InvalidName, DuplicateName, UnsupportedTensor,
    InvalidInput.
    """

    def __init__(
        self,
        writer: Writer,
        plan: ShardPlan,
        *,
        metadata: Mapping[str, str] = {},
        algorithm: str = DEFAULT,
        align: int = PAGE,
    ) -> None:
        header = header_bytes(plan, metadata, align)
        self._writer = writer
        self._plan = plan
        self._algorithm = algorithm
        self._file_hash = hasher(algorithm)
        self._size = 0
        self._entries: list[TensorEntry] = []
        self._beside = Pool(1, thread_name_prefix="ckptsync-digest")
        self._write(memoryview(header))

    def add(self, name: str, data: Bytes) -> None:
        """Write the next tensor's little-endian contiguous bytes; `data` may be reused when this returns.

        InvalidInput if it is not the plan's next tensor, or not of its size. Raises the store's errors.
        """
        view = _flat(data)
        self._check_next(name, view.nbytes)
        spec = self._plan.tensors[len(self._entries)]
        state = hasher(self._algorithm)
        for start in range(0, view.nbytes, _CHUNK):
            self._write(view[start : start + _CHUNK], state)
        self._entries.append(
            TensorEntry(name=name, dtype=spec.dtype, shape=spec.shape, digest=state.hexdigest(), file=self._plan.file)
        )

    def finish(self) -> tuple[FileEntry, tuple[TensorEntry, ...]]:
        """Commit the file: durable and visible when this returns. InvalidInput if tensors are missing."""
        missing = self._plan.tensors[len(self._entries) :]
        if missing:
            raise InvalidInput(f"{self._plan.file}: {len(missing)} tensors missing, from {missing[0].name!r} on")
        self._beside.shutdown()
        self._writer.commit()
        entry = FileEntry(name=self._plan.file, size=self._size, digest=self._file_hash.hexdigest())
        return entry, tuple(self._entries)

    def abort(self) -> None:
        """Leave no trace under the file's name; never raises."""
        self._beside.shutdown()
        self._writer.abort()

    def _check_next(self, name: str, size: int) -> None:
        done, tensors = len(self._entries), self._plan.tensors
        if done == len(tensors):
            raise InvalidInput(f"{self._plan.file} is complete: {name!r} is not in its plan")
        spec = tensors[done]
        if name != spec.name:
            raise InvalidInput(f"{self._plan.file}: {spec.name!r} comes next in the plan, not {name!r}")
        if size != spec.nbytes:
            raise InvalidInput(
                f"tensor {name!r} has {size} bytes, but {spec.dtype}{list(spec.shape)} has {spec.nbytes}"
            )

    def _write(self, chunk: memoryview, *states: Hasher) -> None:
        """Digest in a thread beside while the store takes the bytes; both are done with them on return."""
        if chunk.nbytes < _SMALL:
            _digest(chunk, [self._file_hash, *states])
            self._writer.write(chunk)
            self._size += chunk.nbytes
            return
        digesting = self._beside.submit(_digest, chunk, [self._file_hash, *states])
        try:
            self._writer.write(chunk)
        finally:
            digesting.result()
        self._size += chunk.nbytes


def _digest(chunk: memoryview, states: list[Hasher]) -> None:
    for start in range(0, chunk.nbytes, _CACHED):
        piece = chunk[start : start + _CACHED]
        for state in states:
            state.update(piece)


def header_bytes(plan: ShardPlan, metadata: Mapping[str, str] = {}, align: int = PAGE) -> bytes:
    """Length, header and padding of the plan's file: everything before its data, which starts at a multiple of
    `align`."""
    check_specs(plan.tensors)
    _check_metadata(metadata)
    # transformers 4 refuses metadata without `format`; every writer for torch says "pt".
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for spec in plan.tensors:
        end = offset + spec.nbytes
        fields[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (offset, end)}
        offset = end
    text = msgspec.json.encode(fields)
    text += b" " * (-(8 + len(text)) % align)
    if len(text) > MAX_HEADER:
        raise InvalidInput(f"{plan.file}: a header of {len(text)} bytes, where readers take {MAX_HEADER} at most")
    return len(text).to_bytes(8, "little") + text


def _check_metadata(metadata: Mapping[str, str]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidInput(f"safetensors metadata must be str: {key!r} is {value!r}; write str(…) or leave it out")
        try:
            (key + value).encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"safetensors metadata {key!r} holds a lone surrogate: not UTF-8") from None


def _flat(data: Bytes) -> memoryview:
    view = memoryview(data)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
