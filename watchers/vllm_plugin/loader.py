"""The model loader `ckptsync`: an engine that starts, or restarts, comes up on a channel's version.

    --load-format ckptsync --model BASE_DIR
    --model-loader-extra-config '{"root": "s3://…", "version": "latest", "stage": "/dev/shm/ckptsync"}'

BASE_DIR has the config and the tokenizer; weights need not be there. The version is staged and verified like a
watcher's, one rank of a host reading the store for all. On an empty channel the weights of BASE_DIR are loaded,
where there are any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from vllm.model_executor.model_loader import DefaultModelLoader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ckptsync import logs
from ckptsync.channel import Channel
from ckptsync.engine import StagedVersion
from ckptsync.errors import ChannelEmpty, InvalidInput, SchemaMismatch
from ckptsync.manifest import MAIN_TRACK, TensorSpec, tensor_specs
from ckptsync.shards.tensors import map_tensors
from watchers.stage import Stage

log = logs.get(__name__)

started_on: StagedVersion | None = None
"""The version that this process's model was loaded from; None for other loaders, and on an empty channel."""

_holding: Stage | None = None
"""Keeps that version in the stage until another is loaded: it is what a failed first update goes back to."""


class LoaderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`--model-loader-extra-config`."""

    root: str
    version: str = "latest"
    stage: str = "/dev/shm/ckptsync"  # noqa: S108 - the stage checks that its folder there is our own
    require_signature: str | None = None


def schema_started_on() -> Mapping[str, TensorSpec] | None:
    """What the version that the engine started on consists of."""
    return tensor_specs(started_on.manifest.tracks[MAIN_TRACK]) if started_on is not None else None


def let_go() -> None:
    """Another version is in: the one that the engine started on may be evicted."""
    global _holding
    if _holding is not None:
        _holding.close()
        _holding = None


class CkptsyncModelLoader(BaseModelLoader):
    """vLLM's own loading, from a staged version."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        try:
            self.config = msgspec.convert(load_config.model_loader_extra_config, LoaderConfig)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"--model-loader-extra-config of ckptsync: {error}") from error
        self._default = DefaultModelLoader(replace(load_config, load_format="auto", model_loader_extra_config={}))

    def download_model(self, model_config: Any) -> None:  # noqa: ARG002 - vLLM's signature
        stage = Stage(self.config.stage)
        self._due(stage)
        stage.close()

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        global started_on, _holding
        stage = Stage(self.config.stage)
        version = self._due(stage)
        if version is None:
            more = {"event": "channel-empty", "channel": self.config.root}
            text = "the channel %s is empty: starting on the weights of %s"
            log.warning(text, self.config.root, model_config.model, extra=more)
            self._default.load_weights(model, model_config)
            return
        loaded = model.load_weights(_tensors(version))  # type: ignore[operator]
        _check_complete(version, model, loaded, model_config)
        started_on, _holding = version, stage
        more = logs.about(version.manifest.id, event="started-on", channel=self.config.root)
        log.info("loaded %s from %s", version.label, self.config.root, extra=more)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """For `reload_weights`: the version that is due now."""
        stage = Stage(self.config.stage)
        try:
            version = self._due(stage)
            yield from (_tensors(version) if version else self._default.get_all_weights(model_config, model))
        finally:
            stage.close()

    def _due(self, stage: Stage) -> StagedVersion | None:
        channel = Channel.open(self.config.root, require_signature=self.config.require_signature)
        try:
            manifest = channel.latest() if self.config.version == "latest" else channel.resolve(self.config.version)
        except ChannelEmpty:
            return None
        return stage.stage(channel, manifest)


def _tensors(version: StagedVersion) -> Iterable[tuple[str, torch.Tensor]]:
    return map_tensors(version.folder, version.manifest.tracks[MAIN_TRACK])


def _check_complete(version: StagedVersion, model: torch.nn.Module, loaded: Any, model_config: Any) -> None:
    """A parameter that nothing was loaded into holds whatever was in memory."""
    if not isinstance(loaded, set) or model_config.quantization is not None:
        return
    missing = sorted({name for name, _ in model.named_parameters()} - loaded)
    if missing:
        raise SchemaMismatch(f"{version.label} has nothing for {len(missing)} parameters ({missing[0]}, …)")
