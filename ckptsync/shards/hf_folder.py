"""What is in a Hugging Face checkpoint folder, from its index and its headers; no tensor is read."""

from __future__ import annotations

import os
from typing import NamedTuple

from .. import logs
from ..errors import BadShard, NotFound
from ..manifest import TensorSpec
from .file import FileReader
from .index import INDEX_NAME, MAX_INDEX, read_index
from .read import read_header, some

SINGLE_NAME = "model.safetensors"

logger = logs.get(__name__)


class Checkpoint(NamedTuple):
    """The shard files by name, every tensor's spec, and the safetensors files that are no part of it."""

    files: list[str]
    tensors: dict[str, TensorSpec]
    ignored: list[str]


def scan_checkpoint(folder: str) -> Checkpoint:
    """The checkpoint that transformers, vLLM and SGLang would see in `folder`.

    With an index, its files and no other; else `model.safetensors` alone. Other safetensors files are stale
    or foreign: they are left out, listed, and logged once. Links are followed, since the Hugging Face cache
    consists of them.

    NotFound if there is no checkpoint; BadShard, naming the file, if a shard is missing or broken, lacks a
    tensor that the index has in it, or holds one that another shard holds too.
    """
    index = _index(folder)
    files = [SINGLE_NAME] if index is None else sorted(set(index.values()))
    missing = [file for file in files if not os.path.exists(os.path.join(folder, file))]
    if missing:
        raise BadShard(f"{folder}: {INDEX_NAME} names {some(missing)}, which is not there")
    tensors, holder = _scan(folder, files)
    for name, file in (index or {}).items():
        if holder.get(name) != file:
            raise BadShard(f"{os.path.join(folder, file)} lacks {name!r}, which {INDEX_NAME} has in it")
    return Checkpoint(files, tensors, _ignored(folder, files))


def _index(folder: str) -> dict[str, str] | None:
    path = os.path.join(folder, INDEX_NAME)
    if not os.path.exists(path):
        if not os.path.exists(os.path.join(folder, SINGLE_NAME)):
            raise NotFound(f"{folder} is no checkpoint: it has neither {INDEX_NAME} nor {SINGLE_NAME}")
        return None
    reader = FileReader(path, follow_symlinks=True)
    try:
        data = bytearray(min(reader.size, MAX_INDEX + 1))
        reader.readinto(0, memoryview(data))
    finally:
        reader.close()
    return read_index(bytes(data))


def _scan(folder: str, files: list[str]) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    tensors: dict[str, TensorSpec] = {}
    holder: dict[str, str] = {}
    for file in files:
        header = read_header(os.path.join(folder, file), follow_symlinks=True)
        # vLLM reads every key of every shard it opens: of two with one name the last would win.
        if twice := holder.keys() & header.tensors.keys():
            other = holder[min(twice)]
            raise BadShard(f"{folder}: {some(twice)} is in {other!r} and in {file!r}")
        for name, stored in header.tensors.items():
            tensors[name], holder[name] = stored.spec, file
    return tensors, holder


def _ignored(folder: str, files: list[str]) -> list[str]:
    ignored = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name not in files)
    if ignored:
        logger.warning("%s: %s not in the checkpoint, ignored", folder, some(ignored), extra={"event": "ignored-names"})
    return ignored
