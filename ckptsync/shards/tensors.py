"""torch tensors to and from the bytes of a shard.

A tensor that is not plain memory (sparse, quantized, meta, fake, a wrapper) is refused by name: written as
bytes it would be wrong, or another thing when it comes back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch

from ..digest import DEFAULT
from ..errors import BadShard, UnsupportedTensor
from ..manifest import FileEntry, TensorEntry, TensorSpec, Track, check_basename
from .file import FileReader
from .hf_folder import scan_checkpoint
from .plan import element_size
from .read import Header, StoredTensor, check_header, read_header

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
    "U32": "uint32", "I32": "int32", "F32": "float32",
    "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute) for name, attribute in _TORCH_NAMES.items() if hasattr(torch, attribute)
}
"""safetensors name -> dtype, as far as this torch has it (E8M0 since 2.7, F4 since 2.8; none has F6)."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

Memory = Callable[[FileReader, FileEntry], object]


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What the tensor will be in a shard. A DTensor's spec is that of the whole tensor.

    The shape counts elements: torch's packed F4 holds two per byte, so its last dimension doubles, as
    safetensors does it. UnsupportedTensor, naming the tensor, for what cannot be written.
    """
    _check_plain(f"tensor {name!r}", tensor, sharded=True)
    dtype = DTYPE_NAMES[tensor.dtype]
    shape = tuple(tensor.shape)
    if dtype == "F4":
        if not shape:
            raise UnsupportedTensor(f"tensor {name!r}: a packed F4 scalar has no dimension to count two elements in")
        shape = (*shape[:-1], 2 * shape[-1])
    return TensorSpec(name, dtype, shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The contiguous CPU bytes of a tensor, without a copy where it is that already.

    A view into a larger buffer gives its own bytes only. The memory stays alive as long as the result, and
    shows later in-place changes of the tensor if nothing was copied. UnsupportedTensor as in `spec_of`.
    """
    _check_plain(f"a tensor of shape {list(tensor.shape)}", tensor, sharded=False)
    if not tensor.numel():
        return memoryview(b"")
    # Complex tensors can be conjugated, and any can be negated, by a flag alone.
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape(-1): one element taken from a strided view counts as contiguous and keeps its stride.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def load_tensors(
    folder: str, track: Track, *, verify: bool = False, algorithm: str = DEFAULT
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a version's folder by name, in file order; ties as the same tensor, after their target.

    Each shard is read into one arena of host memory, past the page cache where possible; its tensors are
    writable views of it and keep it alive together, so one shard is in memory at a time if the caller drops
    them. With `verify` the digest of the whole file is checked before its first tensor is given out.

    BadShard if a file is missing, is a link, or is not what the track says; UnsupportedTensor for a dtype
    that this torch lacks.
    """

    def read(reader: FileReader, file: FileEntry) -> object:
        arena, found = reader.read_arena(algorithm if verify else None)
        if verify and found != file.digest:
            raise BadShard(f"{reader.path}: {algorithm} {found}, where the manifest says {file.digest}")
        return arena

    return _tensors(folder, track, read)


def map_tensors(folder: str, track: Track) -> Iterator[tuple[str, torch.Tensor]]:
    """Like `load_tensors`, as views of privately mapped files: for staged copies on tmpfs or a local disk.

    Nothing is read before a tensor is used, and nothing is verified. The files must not change while any
    tensor lives: one that is truncated kills the process with SIGBUS, one that is rewritten in place
    changes the tensors. Removing a file is harmless. Not for network storage. A write into a tensor stays
    in this process.
    """
    return _tensors(folder, track, lambda reader, _: reader.map())


def checkpoint_tensors(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face folder, mapped as by `map_tensors`; links (its cache) are followed."""
    for file in scan_checkpoint(folder).files:
        reader = FileReader(os.path.join(folder, file), follow_symlinks=True)
        try:
            header, memory = read_header(reader), reader.map()
        finally:
            reader.close()
        yield from _views(header, memory)


def _tensors(folder: str, track: Track, memory_of: Memory) -> Iterator[tuple[str, torch.Tensor]]:
    ties = _ties(track)
    tied = {name for names in ties.values() for name in names}
    stored_in = {tensor.file for tensor in track.tensors}
    for file in track.files:
        if file.name not in stored_in:
            continue
        for name, tensor in _shard(folder, file, track, memory_of):
            if name in tied:
                continue  # policy `duplicate` stores its bytes too; it is given out with its target
            for each in (name, *ties.get(name, ())):
                yield each, tensor


def _shard(folder: str, file: FileEntry, track: Track, memory_of: Memory) -> Iterator[tuple[str, torch.Tensor]]:
    reader = FileReader(os.path.join(folder, check_basename(file.name)))
    try:
        header = read_header(reader)
        check_header(header, file, track)
        memory = memory_of(reader, file)
    finally:
        reader.close()
    return _views(header, memory)


def _views(header: Header, memory: object) -> Iterator[tuple[str, torch.Tensor]]:
    for name, stored in header.tensors.items():
        yield name, _view(stored, memory)


def _view(stored: StoredTensor, memory: object) -> torch.Tensor:
    spec, offset = stored
    dtype, shape = _torch_layout(spec)
    if not spec.nbytes:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes, offset=offset)
    if offset % element_size(spec.dtype):
        raw = raw.clone()  # written by others: a hole-free file may put a tensor on any address
    return raw.view(dtype).view(shape)


def _torch_layout(spec: TensorSpec) -> tuple[torch.dtype, tuple[int, ...]]:
    if spec.dtype not in TORCH_DTYPES:
        raise UnsupportedTensor(f"tensor {spec.name!r}: torch {torch.__version__} has no dtype for {spec.dtype}")
    if spec.dtype != "F4":
        return TORCH_DTYPES[spec.dtype], spec.shape
    if not spec.shape or spec.shape[-1] % 2:
        raise UnsupportedTensor(f"tensor {spec.name!r}: torch packs F4 in pairs, which F4{list(spec.shape)} has not")
    return TORCH_DTYPES["F4"], (*spec.shape[:-1], spec.shape[-1] // 2)


def _ties(track: Track) -> dict[str, list[str]]:
    """Stored name -> the names tied to it."""
    by_name = {tensor.name: tensor for tensor in track.tensors}
    ties: dict[str, list[str]] = {}
    for tensor in track.tensors:
        if tensor.alias_of:
            ties.setdefault(_target(tensor, by_name).name, []).append(tensor.name)
    return ties


def _target(tensor: TensorEntry, by_name: dict[str, TensorEntry]) -> TensorEntry:
    target = tensor
    for _ in by_name:
        if not target.alias_of:
            break
        target = by_name[target.alias_of]
    if target.alias_of or (target.dtype, target.shape) != (tensor.dtype, tensor.shape):
        raise BadShard(f"tensor {tensor.name!r} is tied in a circle, or to {target.name!r} of another shape or dtype")
    return target


def _check_plain(what: str, tensor: torch.Tensor, *, sharded: bool) -> None:
    if reason := _not_plain(tensor, sharded):
        raise UnsupportedTensor(f"{what} cannot be written: {reason}")


def _not_plain(tensor: torch.Tensor, sharded: bool) -> str:
    if tensor.is_meta:
        return "it is on the meta device and holds no values; materialize it first"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        # Its memory is not its values: FakeTensor has none, DTensor a part, quantized wrappers several.
        if not hasattr(tensor, "full_tensor"):
            return f"{type(tensor).__name__} is not plain memory; unwrap or dequantize it"
        if not sharded:
            return "it is sharded; gather it with full_tensor() first"
    if tensor.is_nested:
        return "it is nested; write its parts, or call to_padded_tensor()"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; call to_dense() first"
    if tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
        return f"safetensors has no dtype for {tensor.dtype}"
    return ""
