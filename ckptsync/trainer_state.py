"""Optimizer, scheduler, RNG: what a trainer needs besides weights, beside them in the version.

torch.distributed.checkpoint plans who writes and reads what, so a state saved on one number of ranks loads on
another; this module is its storage. What DCP would pickle is written differently, since a pickle read back runs
code: tensors as safetensors, one file per rank, and everything else as JSON inside an index:

    data/e0001-v00000042-<nonce>/trainer/index.json
                                         state-00000.safetensors ...        one per rank that has tensors

The manifest lists these files apart from the tracks, so no engine ever stages them.

A plain tensor, such as an RNG state, counts as the same on every rank and is kept once; per-rank state has no
meaning at another world size. Trainer state is read on every rank, so every rank needs the root.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import closing
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .dcp import own_group, run_dcp
from .digest import digest
from .errors import BadShard, InvalidInput
from .layout import TRAINER
from .manifest import FileEntry, TensorSpec
from .plain_data import from_json, to_json
from .ranks import Ranks
from .resume_read import check_inside, read_part
from .shards.plan import ShardPlan
from .shards.read import Header, read_header
from .shards.tensors import DTYPE_NAMES, TORCH_DTYPES, tensor_bytes
from .shards.write import ShardWriter
from .store.base import Reader, Store, put_bytes

INDEX = "index.json"
MAX_INDEX = 512 << 20

Open = Callable[[str], Reader]


class Chunk(msgspec.Struct, frozen=True):
    """A box of one tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str


class StoredState(msgspec.Struct, frozen=True):
    """One tensor of the state: dtype by its safetensors name, full shape, and its boxes."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class StateIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`trainer/index.json`: by the state's flattened names."""

    format: int = 1
    tensors: dict[str, StoredState]
    values: dict[str, Any]


# -- saving --------------------------------------------------------------------------------------------------


def check_trainer_state(state: Mapping[str, Any]) -> None:
    """InvalidInput, naming it, for a value that is neither a tensor nor plain data."""
    if not isinstance(state, Mapping):
        raise InvalidInput(f"trainer_state is {type(state).__name__}: pass a state dict")
    for name, value in flatten_state_dict(_plain(state))[0].items():
        if not isinstance(value, torch.Tensor):
            to_json(name, value)
        elif value.dtype not in DTYPE_NAMES:
            raise InvalidInput(f"trainer_state {name!r}: {value.dtype} cannot be stored")


class Saving:
    """A trainer state on its way out with a version: checked when made, written by `save`.

    Making one is collective: DCP gets a gloo group of its own, made where the trainer makes its groups too. With
    `copy` the state is copied to host memory first, so that training may go on.
    """

    def __init__(self, state: Mapping[str, Any], ranks: Ranks, *, copy: bool = False) -> None:
        check_trainer_state(state)
        self._state = _host_copy(_plain(state)) if copy else _plain(state)
        self._group = own_group(ranks)

    def paths(self, folder: str, world_size: int) -> list[str]:
        """Every file that `save` may write below `folder`, for taking them away again."""
        names = [INDEX, *(state_file(rank) for rank in range(world_size))]
        return [f"{folder}/{TRAINER}/{name}" for name in names]

    def save(self, store: Store, folder: str, ranks: Ranks, algorithm: str) -> tuple[FileEntry, ...]:
        """Write below `folder`, a version's data folder. Collective; every rank writes its own tensors.

        Returns the files for the manifest, on every rank. They are no version yet: only the manifest makes one.
        """
        writer = _Writer(store, f"{folder}/{TRAINER}", ranks.rank, algorithm)
        run_dcp(
            ranks,
            "the writing of the trainer state",
            lambda where: dcp_save(self._state, storage_writer=writer, planner=_JsonSavePlanner(), **where),
            self._group,
        )
        return tuple(file for files in ranks.gather(writer.files) for file in files)


def state_file(rank: int) -> str:
    return f"state-{rank:05d}.safetensors"


class _JsonSavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(json.dumps(to_json(write_item.index.fqn, object)).encode())
        return object


class _Writer(StorageWriter):
    """One rank's side of a save: one safetensors file, and on rank 0 the index."""

    def __init__(self, store: Store, folder: str, rank: int, algorithm: str) -> None:
        self._store, self._folder, self._algorithm = store, folder, algorithm
        self._file = state_file(rank)
        self.files: list[FileEntry] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        boxes = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        results = [self._value(item, planner) for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if boxes:
            results += self._write_boxes(boxes, planner)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for each in results for result in each}
        tensors, values = {}, {}
        for name, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                tensors[name] = _stored(name, stored, places)
            else:
                values[name] = json.loads(places[MetadataIndex(name)])
        data = msgspec.json.encode(StateIndex(tensors=tensors, values=values))
        put_bytes(self._store, f"{self._folder}/{INDEX}", data)
        self.files.append(FileEntry(name=INDEX, size=len(data), digest=digest(data, self._algorithm)))

    @classmethod
    def validate_checkpoint_id(cls, _: Any) -> bool:
        return True

    def _value(self, item: WriteItem, planner: SavePlanner) -> WriteResult:
        data = planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise InvalidInput(f"trainer_state {item.index.fqn!r} is not plain data")
        text = data.getvalue().decode()
        return WriteResult(index=item.index, size_in_bytes=len(text), storage_data=text)

    def _write_boxes(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        plan = ShardPlan(self._file, tuple(map(_box_spec, items)))
        writer = self._store.write(f"{self._folder}/{self._file}")
        try:
            shard = ShardWriter(writer, plan, algorithm=self._algorithm)
            for item, spec in zip(items, plan.tensors, strict=True):
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, torch.Tensor):
                    raise InvalidInput(f"trainer_state {item.index.fqn!r} is no tensor")
                shard.add(spec.name, tensor_bytes(tensor.detach()))
            file, _ = shard.finish()
        except BaseException:
            writer.abort()
            raise
        self.files.append(file)
        return [
            WriteResult(index=item.index, size_in_bytes=spec.nbytes, storage_data=(self._file, spec.name))
            for item, spec in zip(items, plan.tensors, strict=True)
        ]


def _box_spec(item: WriteItem) -> TensorSpec:
    if item.tensor_data is None:
        raise InvalidInput(f"trainer_state {item.index.fqn!r} has no shape")
    name = item.index.fqn + "@" + ",".join(map(str, item.tensor_data.chunk.offsets))
    return TensorSpec(name, DTYPE_NAMES[item.tensor_data.properties.dtype], tuple(item.tensor_data.chunk.sizes))


def _stored(name: str, stored: TensorStorageMetadata, places: Mapping[MetadataIndex, tuple[str, str]]) -> StoredState:
    chunks = []
    for chunk in stored.chunks:
        file, inside = places[MetadataIndex(name, chunk.offsets)]
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, inside))
    return StoredState(DTYPE_NAMES[stored.properties.dtype], tuple(stored.size), tuple(chunks))


# -- loading -------------------------------------------------------------------------------------------------


def load_trainer_state(state: MutableMapping[str, Any], open_file: Open, ranks: Ranks) -> None:
    """Fill `state` in place from a version's files, which were verified before. Collective.

    InvalidInput if the saved state lacks a name that `state` has, or has it in another shape.
    """
    reader = _Reader(open_file)
    run_dcp(
        ranks,
        "the reading of the trainer state",
        lambda where: dcp_load(state, storage_reader=reader, planner=_JsonLoadPlanner(), **where),
        own_group(ranks),
    )


class _JsonLoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        set_element(
            self.original_state_dict,
            self.mappings[read_item.dest_index.fqn],
            from_json(json.loads(value.getvalue())),
        )


class _Reader(StorageReader):
    """One rank's side of a load."""

    def __init__(self, open_file: Open) -> None:
        self._open = open_file
        self._index = read_state_index(open_file)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: _described(stored) for name, stored in self._index.tensors.items()
        }
        return Metadata({**entries, **{name: BytesStorageMetadata() for name in self._index.values}})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Chunk]]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                value = self._index.values[item.storage_index.fqn]
                planner.load_bytes(item, io.BytesIO(json.dumps(value).encode()))
            else:
                chunk = self._chunk(item)
                by_file.setdefault(chunk.file, []).append((item, chunk))
        for file, items in by_file.items():
            with closing(self._open(file)) as reader:
                header = read_header(reader, name=file)
                for item, chunk in items:
                    self._read(reader, header, item, chunk, planner)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, _: Any) -> bool:
        return True

    def _chunk(self, item: ReadItem) -> Chunk:
        at = tuple(item.storage_index.offset or ())
        return next(c for c in self._index.tensors[item.storage_index.fqn].chunks if c.offsets == at)

    def _read(self, reader: Reader, header: Header, item: ReadItem, chunk: Chunk, planner: LoadPlanner) -> None:
        stored = header.tensors.get(chunk.name)
        if stored is None or stored.spec.shape != chunk.sizes or stored.spec.dtype not in TORCH_DTYPES:
            raise BadShard(f"{chunk.file} does not hold {chunk.name!r} as the index of the trainer state says")
        box = zip(item.storage_offsets, item.lengths, strict=True)
        part = tuple(((start, start + length),) for start, length in box)
        check_inside(chunk.name, part, chunk.sizes)
        data = read_part(reader, stored.offset, chunk.sizes, TORCH_DTYPES[stored.spec.dtype], part)
        target = planner.resolve_tensor(item).detach()
        target.copy_(data)
        planner.commit_tensor(item, target)


def read_state_index(open_file: Open) -> StateIndex:
    """The index of a trainer state. BadShard if it is not one."""
    with closing(open_file(INDEX)) as reader:
        if reader.size > MAX_INDEX:
            raise BadShard(f"{TRAINER}/{INDEX} has {reader.size} bytes, more than {MAX_INDEX}")
        data = bytearray(reader.size)
        if data:
            reader.readinto(0, memoryview(data))
    try:
        return msgspec.json.decode(bytes(data), type=StateIndex)
    except msgspec.DecodeError as error:
        raise BadShard(f"{TRAINER}/{INDEX} is not the index of a trainer state: {error}") from error


def _described(stored: StoredState) -> TensorStorageMetadata:
    if stored.dtype not in TORCH_DTYPES:
        raise BadShard(f"{TRAINER}/{INDEX}: torch {torch.__version__} has no {stored.dtype}")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=TORCH_DTYPES[stored.dtype]),
        size=torch.Size(stored.size),
        chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in stored.chunks],
    )


# -- running DCP ---------------------------------------------------------------------------------------------


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of everything that has one (DCP's Stateful)."""
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _host_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _host_copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_host_copy(item) for item in value)
    return value
