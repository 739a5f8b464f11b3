"""The weight transfer engine `ckptsync`: one in each worker of vLLM 0.26 to 0.33.

What travels is a folder's name and a digest; the bytes are on the worker's host, verified. The live model is
touched in `receive_weights` only, so that a start without an update leaves nothing behind.

Seen on vLLM 0.32: after one wrong shape every later good reload fails too, since the bad tensor stays buffered
in the layerwise state. `_clean` clears it; rollback and forward were exact after that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from ckptsync.engine import StagedVersion
from ckptsync.errors import BadManifest, CkptSyncError, EngineRefused
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import MAX_BYTES, TensorSpec, decode
from ckptsync.shards.tensors import spec_of
from watchers.engines._schema import folder_schema

from . import loader
from .derived import holds_more_than_parameters
from .live import EngineSide, LiveModel, Outcome
from .receipts import receipt_of, write_ready, write_receipt


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A version to get ready for while the engine serves; or nothing."""

    folder: str = ""
    manifest_digest: str = ""
    receipts: str = ""
    """A folder where each rank says when it is ready."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """A staged version, on every rank's host."""

    folder: str
    manifest_digest: str
    label: str
    receipts: str = ""
    """A folder for one receipt per rank; none is written without."""


class CkptsyncWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's side of `LiveModel`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # `reload_weights` by somebody else points model_config.model elsewhere: look now.
        self._started_with = vllm_config.model_config.model
        self._schema: Mapping[str, TensorSpec] | None = None
        self.live = LiveModel(
            model,
            EngineSide(
                reload=self._reload,
                base=self._base,
                schema=self._schema_of_start,
                unplannable=lambda: holds_more_than_parameters(model),
            ),
        )
        self.live.good = loader.started_on
        self.outcome: Outcome | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Returns at once, while a thread of its own gets ready."""
        if init_info.folder:
            version = _staged(init_info.folder, init_info.manifest_digest)
            self.live.prepare(version, lambda: write_ready(init_info.receipts, self._rank()))

    def start_weight_update(self) -> None:
        """Nothing is touched yet."""
        self.outcome = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load, prove, and say how it went, in a receipt and by raising; after an error see `live.Outcome`."""
        try:
            self._refuse_drafts()
            version = _staged(update_info.folder, update_info.manifest_digest)
        except CkptSyncError as error:
            self.outcome = Outcome(state="refused", error=error)
        else:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                self.outcome = self.live.update(version)
        if self.outcome.state == "loaded":
            loader.let_go()
        if update_info.receipts:
            receipt = receipt_of(self.outcome, self._rank(), update_info.label, update_info.manifest_digest)
            write_receipt(update_info.receipts, receipt)
        if self.outcome.error is not None:
            raise self.outcome.error

    def finish_weight_update(self) -> None:
        """The update was finished when it was received."""

    def shutdown(self) -> None:
        self.live.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract up to vLLM 0.27. Trainers publish; they do not call engines."""
        raise NotImplementedError("ckptsync trainers publish to a channel")

    def _rank(self) -> int:
        parallel = self.parallel_config
        replica = getattr(parallel, "data_parallel_index", None)
        replica = parallel.data_parallel_rank if replica is None else replica
        return int(replica * parallel.world_size + parallel.rank)

    def _refuse_drafts(self) -> None:
        speculative = self.vllm_config.speculative_config
        draft = getattr(speculative, "draft_model_config", None)
        if draft is not None:
            raise EngineRefused(f"the draft model {draft.model} would keep its old weights; start without it")

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)
            finalize_layerwise_reload(self.model, self.model_config)
        except BaseException:
            self._clean()
            raise

    def _clean(self) -> None:
        """Throw away what is buffered, and put the layers together again: a well-formed model with mixed values."""
        for module in self.model.modules():
            info = get_layerwise_info(module)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)

    def _base(self) -> Iterable[tuple[str, torch.Tensor]]:
        model_loader: Any = get_model_loader(self.vllm_config.load_config)
        self.model_config.model = self._started_with
        return model_loader.get_all_weights(self.model_config, self.model)  # type: ignore[no-any-return]

    def _schema_of_start(self) -> Mapping[str, TensorSpec] | None:
        if self._schema is None:
            self._schema = loader.schema_started_on() or folder_schema(self._started_with) or self._schema_read()
        return self._schema

    def _schema_read(self) -> Mapping[str, TensorSpec]:
        """By reading the weights it was started with once more: a hub id names no folder."""
        return {name: spec_of(name, tensor) for name, tensor in self._base()}


def _staged(folder: str, manifest_digest: str) -> StagedVersion:
    path = os.path.join(folder, SELF_COPY)
    try:
        with open(path, "rb") as file:
            manifest = decode(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise EngineRefused(f"{path} cannot be read on this rank's host: {error}") from error
    if manifest.manifest_digest != manifest_digest:
        raise BadManifest(f"{path} is another version's manifest than the one announced")
    return StagedVersion(manifest=manifest, folder=folder)
