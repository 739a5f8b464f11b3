"""The custom weight loader of SGLang's workers: one live model in each, brought to the version that a call names.

An error that escapes from here kills the scheduler, and with it the server. So none does: each rank says in a
receipt what it holds, and the adapter judges all of them before the label is set. A rank that cannot write a
receipt touches nothing.

While the server serves, the watcher posts what is to be prepared into a mailbox, which the first call has named.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_parallel, get_server_args

from ckptsync import logs
from ckptsync.errors import CkptSyncError, EngineDirty
from ckptsync.manifest import TensorSpec
from ckptsync.shards.tensors import spec_of
from ckptsync.version import parse_label
from watchers.engines._schema import folder_schema
from watchers.live.announced import announced
from watchers.live.mailbox import listen
from watchers.live.model import EngineSide, LiveModel, Weights
from watchers.live.outcome import Outcome
from watchers.live.receipts import receipt_of, write_begun, write_ready, write_receipt

from .announcement import BASE_LABEL, Announcement, decode
from .derived import holds_more_than_parameters

log = logs.get(__name__)

_live: dict[torch.nn.Module, LiveModel] = {}
"""This process's model, once it was updated."""

_listening: set[str] = set()
_lock = threading.Lock()
"""Between the scheduler's thread, which updates, and the mailbox's, which prepares."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Called by SGLang between `begin_weight_update` and `end_weight_update`, on every tensor and pipeline rank."""
    try:
        _answer(model, decode(named_tensors))
    except Exception:  # the server must live; without a receipt the adapter takes this rank for dirty
        log.exception("ckptsync: this rank cannot say what it holds", extra={"event": "no-receipt"})


def _answer(model: torch.nn.Module, announcement: Announcement) -> None:
    rank = _rank()
    write_begun(announcement.receipts, rank)
    outcome = _update(model, announcement)
    if outcome.error is not None:
        version = parse_label(announcement.label)
        more = {**(logs.about(version) if version is not None else {}), "event": f"rank-{outcome.state}"}
        log.warning("ckptsync: rank %d %s: %s", rank, outcome.state, outcome.error, extra=more)
    write_receipt(announcement.receipts, receipt_of(outcome, rank, announcement.label, announcement.manifest_digest))
    _listen(model, rank, announcement.mailbox)


def _update(model: torch.nn.Module, announcement: Announcement) -> Outcome:
    try:
        version = announced(announcement.folder, announcement.manifest_digest)
    except CkptSyncError as error:
        return Outcome(state="refused", error=error)
    live = _live_of(model)
    goes_back_to = live.good.label if live.good is not None else BASE_LABEL
    try:
        with _lock, torch.no_grad():
            outcome = live.update(version)
    except Exception as error:  # noqa: BLE001 - said in the receipt
        return Outcome(state="dirty", error=EngineDirty(f"{announcement.label}: {type(error).__name__}: {error}"))
    if outcome.state == "restored" and goes_back_to != announcement.serves:
        # Somebody loaded another version from disk since our last update.
        text = f"{outcome.error}; it went back to {goes_back_to}, and had served {announcement.serves}"
        return Outcome(state="dirty", error=EngineDirty(text))
    return outcome


def _listen(model: torch.nn.Module, rank: int, mailbox: str) -> None:
    if mailbox in _listening:
        return
    try:
        listen(mailbox, rank, lambda line: _prepare(model, rank, line))
    except OSError as error:
        more = {"event": "rank-not-listening"}
        log.warning("ckptsync: rank %d cannot listen, and will gather in the pause: %s", rank, error, extra=more)
    else:
        _listening.add(mailbox)


def _prepare(model: torch.nn.Module, rank: int, line: bytes) -> None:
    try:
        announcement = msgspec.json.decode(line, type=Announcement)
        version = announced(announcement.folder, announcement.manifest_digest)
        with _lock:
            _live_of(model).prepare(version, lambda: write_ready(announcement.receipts, rank))
    except Exception:  # the update meets the same error, and reports it
        log.exception("ckptsync: rank %d cannot prepare", rank, extra={"event": "rank-not-prepared"})


def _live_of(model: torch.nn.Module) -> LiveModel:
    if model not in _live:
        side = EngineSide(
            reload=lambda weights: _reload(model, weights),
            base=_base,
            schema=_schema_of_start,
            unplannable=lambda: _unplannable(model),
        )
        _live[model] = LiveModel(model, side)
    return _live[model]


def _unplannable(model: torch.nn.Module) -> str:
    if getattr(get_server_args(), "enable_eplb", False):
        return "the engine moves experts between ranks (--enable-eplb)"
    return holds_more_than_parameters(model)


def _reload(model: torch.nn.Module, weights: Weights) -> None:
    """Within SGLang's session: what it packs after a load was unpacked before this call, and is packed after it."""
    model.load_weights(weights)  # type: ignore[operator]


def _base() -> Iterable[tuple[str, torch.Tensor]]:
    arguments = get_server_args()  # as it was started: updates from disk change the path elsewhere only
    source = DefaultModelLoader.Source(arguments.model_path, arguments.revision)
    return DefaultModelLoader(LoadConfig(load_format="auto"))._get_weights_iterator(source)  # type: ignore[no-any-return]


def _schema_of_start() -> Mapping[str, TensorSpec]:
    """From the folder, else by reading the weights once more: a hub id names no folder."""
    found = folder_schema(get_server_args().model_path)
    return found or {name: spec_of(name, tensor) for name, tensor in _base()}


def _rank() -> int:
    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
