"""The small files beside the weights that make a data folder a Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from os import PathLike
from typing import TYPE_CHECKING, Any

from .digest import sha256
from .errors import InvalidInput
from .manifest import MAIN_TRACK, TensorEntry, check_basename, schema_digest

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

PATTERNS = (
    CONFIG, GENERATION_CONFIG,
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "chat_template*",
    "spiece.model", "sentencepiece*", "*.tiktoken", "tekken.json",
    "preprocessor_config.json", "processor_config.json", "image_processor*.json",
    "video_preprocessor_config.json",
)  # fmt: skip
"""What is copied out of a folder of assets. Weights are ours to write."""

CODE = (".py", ".pyc", ".so", ".pkl", ".pt", ".bin")
"""Never copied, whatever the name: it would be run on the engine's host."""


Folders = str | PathLike[str] | Mapping[str, str | PathLike[str]]
"""A folder for the one track, or one for each track by name."""


def folders_of(folders: Folders | None, tracks: Iterable[str]) -> dict[str, str]:
    """Track -> its folder. InvalidInput for what is no folder's path, or one of no track, or cannot be listed."""
    if isinstance(folders, str | PathLike):
        folders = {MAIN_TRACK: folders}
    if folders is not None and not isinstance(folders, Mapping):
        raise InvalidInput(f"assets={folders!r}: must be a folder, or a dict from each track's name to its folder")
    tracks = sorted(tracks)
    return {_known(track, tracks): _listable(folder) for track, folder in (folders or {}).items()}


def _known(track: str, tracks: Sequence[str]) -> str:
    if track not in tracks:
        raise InvalidInput(f"assets: there is no track {track!r}, only {', '.join(tracks)}")
    return track


def _listable(folder: object) -> str:
    if not isinstance(folder, str | PathLike) or isinstance(path := os.fspath(folder), bytes):
        raise InvalidInput(f"assets: {folder!r} is no folder's path: give a str or a pathlib.Path")
    try:
        os.listdir(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        raise InvalidInput(f"assets={path!r}: {getattr(error, 'strerror', '') or error}") from error
    return path


def assets_of(model: object, folder: str | None, dtype: torch.dtype | None) -> dict[str, bytes]:
    """File name -> content. A file in `folder` wins over what the module's own `config` says.

    `dtype` is the dtype on the wire, which a module's config is brought in line with: an engine takes its
    compute dtype from there. InvalidInput if the folder or a file in it cannot be read.
    """
    return {**_from_model(model, dtype), **(_from_folder(folder) if folder is not None else {})}


def _from_folder(folder: str) -> dict[str, bytes]:
    found = {}
    try:
        for name in sorted(os.listdir(folder)):
            path = os.path.join(folder, name)
            if _wanted(name) and os.path.isfile(path):
                with open(path, "rb") as file:
                    found[check_basename(name)] = file.read()
    except OSError as error:
        raise InvalidInput(f"assets={folder!r}: {error.strerror}: {error.filename}") from error
    return found


def _wanted(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in PATTERNS) and not name.endswith(CODE)


def _from_model(model: object, dtype: torch.dtype | None) -> dict[str, bytes]:
    owner = _unwrapped(model)
    config, generation = getattr(owner, "config", None), getattr(owner, "generation_config", None)
    found = {}
    if (fields := _as_json(config)) is not None:
        # As transformers' save_pretrained does it; fully_shard puts FSDP before the class's name.
        fields["architectures"] = fields.get("architectures") or [type(owner).__name__.removeprefix("FSDP")]
        if (stored := _stored_dtype(owner, dtype)) is not None:
            fields["dtype" if hasattr(config, "dtype") else "torch_dtype"] = str(stored).removeprefix("torch.")
        found[CONFIG] = _dump(fields)
    if (fields := _as_json(generation)) is not None:
        found[GENERATION_CONFIG] = _dump(fields)
    return found


def _unwrapped(model: object) -> object:
    """The module whose class an engine knows. torch.compile and FSDP1 pass `config` on, but not the class."""
    while type(model).__name__ in ("OptimizedModule", "FullyShardedDataParallel"):
        model = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    return model if hasattr(model, "config") else getattr(model, "module", None)


def _stored_dtype(owner: object, dtype: torch.dtype | None) -> torch.dtype | None:
    own: torch.dtype | None = getattr(owner, "dtype", None)
    return dtype if own is not None and dtype is not None and dtype.itemsize < own.itemsize else own


def _as_json(config: object) -> dict[str, Any] | None:
    to_json = getattr(config, "to_json_string", None)
    return dict(json.loads(to_json())) if callable(to_json) else None


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def model_facts(tensors: Iterable[TensorEntry], assets: Mapping[str, bytes]) -> dict[str, str]:
    """For the manifest: `schema_digest`, and `architecture` and `config_digest` where there is a config."""
    facts = {"schema_digest": schema_digest(tensors)}
    if (config := assets.get(CONFIG)) is not None:
        facts["config_digest"] = sha256(config)
        facts.update(_architecture(config))
    return facts


def _architecture(config: bytes) -> dict[str, str]:
    try:
        names = json.loads(config).get("architectures") or []
    except (ValueError, AttributeError) as error:
        raise InvalidInput(f"{CONFIG} is not a JSON object: {error}") from error
    if not isinstance(names, list):
        raise InvalidInput(f"{CONFIG}: architectures is {names!r}, and not a list of names")
    return {"architecture": str(names[0])} if names else {}
