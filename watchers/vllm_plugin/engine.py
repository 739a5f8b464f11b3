"""The weight transfer engine `ckptsync`: one in each worker of vLLM 0.26 to 0.33.

What travels is a folder's name and a digest; the bytes are on the worker's host, verified. Or a trainer broadcasts them
(`stream`). The live model is touched in `receive_weights` only: a start without an update leaves nothing behind.
"""

from __future__ import annotations

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

from ckptsync.errors import CkptSyncError, EngineRefused, SchemaMismatch
from ckptsync.manifest import TensorSpec
from ckptsync.shards.tensors import spec_of
from watchers.engines._schema import folder_schema
from watchers.live.announced import announced
from watchers.live.model import EngineSide, LiveModel
from watchers.live.outcome import Outcome
from watchers.live.receipts import receipt_of, write_ready, write_receipt

from . import loader
from .derived import holds_more_than_parameters
from .reload import Reload, reload
from .stream import BroadcastInfo, JoinInfo, Stream

WITHOUT_WEIGHTS = {"ngram", "ngram_gpu", "suffix"}
"""Ways to guess tokens from the text so far. vLLM 0.32 names the target as the draft model of the first two."""


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
                reload=lambda weights: reload(model, self.model_config, weights),
                base=self._base,
                schema=self._schema_of_start,
                unplannable=lambda: holds_more_than_parameters(model),
            ),
        )
        self.live.good = loader.started_on
        self.outcome: Outcome | None = None
        self._stream = Stream()
        self._broadcast: Reload | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        return _parsed(JoinInfo, init_dict) if "master_address" in init_dict else super().parse_init_info(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        return _parsed(BroadcastInfo, update_dict) if "names" in update_dict else super().parse_update_info(update_dict)

    def init_transfer_engine(self, init_info: InitInfo | JoinInfo) -> None:
        """Joins a trainer's group; or returns at once, while a thread of its own gets ready for a staged version.
        EngineRefused, before a pause, as by an update."""
        if isinstance(init_info, JoinInfo):
            self._stream.join(init_info, self._rank())
        elif init_info.folder:
            self._refuse_drafts()
            version = announced(init_info.folder, init_info.manifest_digest)
            self.live.prepare(version, lambda: write_ready(init_info.receipts, self._rank()))

    def start_weight_update(self) -> None:
        """Nothing is touched yet; what a broadcast that broke off has left buffered is thrown away."""
        self.outcome = None
        self._break_off()

    def receive_weights(self, update_info: UpdateInfo | BroadcastInfo) -> None:
        """Load, prove, and say how it went, in a receipt and by raising; after an error see `live.Outcome`."""
        if isinstance(update_info, BroadcastInfo):
            self._receive(update_info)
            return
        try:
            self._refuse_drafts()
            version = announced(update_info.folder, update_info.manifest_digest)
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
        """The update was finished when it was received. A broadcast that has not ended is that of a dead trainer."""
        self._break_off()

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
        if draft is not None and speculative.method not in WITHOUT_WEIGHTS:
            raise EngineRefused(f"the draft model {draft.model} would keep its old weights; start without it")

    def _receive(self, info: BroadcastInfo) -> None:
        """Some of the weights, or the end of them; SchemaMismatch if not all have come."""
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if self._broadcast is None:
                self._refuse_drafts()
                self.live.overwrite()
                self._broadcast, self._stream.received = Reload(self.model, self.model_config), set()
            if info.names:
                self._broadcast.load(self._stream.receive(info))
                self._stream.received.update(info.names)
                return
            self._check_complete(self._stream.received)
            self._broadcast.finish()
        self._broadcast = None
        self.live.overwritten()
        loader.let_go()

    def _check_complete(self, received: set[str]) -> None:
        # A trainer sends tied weights once, whatever the checkpoint that the engine was started with has.
        tied = {"lm_head.weight"} if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False) else set()
        if missing := sorted((self._schema_of_start() or {}).keys() - received - tied):
            raise SchemaMismatch(f"the broadcast has nothing for {len(missing)} tensors ({missing[0]}, …)")

    def _break_off(self) -> None:
        broadcast, self._broadcast = self._broadcast, None
        if broadcast is not None:
            broadcast.abandon()

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


def _parsed(kind: type[Any], found: dict[str, Any]) -> Any:
    """ValueError, as from vLLM's own, for fields that it has not."""
    try:
        return kind(**found)
    except TypeError as error:
        raise ValueError(f"invalid {kind.__name__}: {error}") from error
