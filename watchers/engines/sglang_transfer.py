"""SGLang over HTTP with ckptsync's plugin in it: installed beside SGLang (>= 0.5.22), it needs no flag.

The same as `sglang`, but for the load: workers verify before they touch the model, load by the copy plan where it
is proven, read back, and go back by themselves after a failure. Every rank leaves a receipt, and the label is set
when all say that they hold the version. Receipts are files beside the staged version: the engine's workers run on
this host, under this user, as for any staged load.

SGLang takes our call by `/update_weights_from_tensor`, and dies of one that names a loader it does not know, or that
comes while its weights are shared: `prepare` and `start` look before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from ckptsync import logs
from ckptsync.engine import EngineStatus, StagedVersion
from ckptsync.engine_http import Answer, Call, Touch
from ckptsync.errors import EngineDirty, EngineRefused
from watchers.live.mailbox import open_mailbox, post
from watchers.live.receipts import (
    any_begun,
    await_ready,
    await_receipts,
    judge,
    notes,
    receipt_folder,
)
from watchers.sglang_plugin.announcement import LOADER, Announcement, encode

from ._proof import RankProof
from .sglang import SglangEngine, boot_of

log = logs.get(__name__)

PLUGIN = f"Install ckptsync in the engine's environment, or start it with --custom-weight-loader {LOADER}."
OPEN = "already open"
UNFLUSHED = "the cache was not flushed"


class SglangTransferEngine(RankProof, SglangEngine):
    """One SGLang server that has the plugin, behind the engine contract."""

    _ranks = 0

    def prepare(self, version: StagedVersion) -> bool:
        """Before the pause: refuse a server that could not load, and let every rank gather the version into pinned
        memory. False before the first update, and if that was not to be had in time; the update then does it."""
        self._refuse_unfit(version, "prepare")
        with receipt_folder(version.folder) as folder:
            announcement = self._announcement(version, folder)
            if not post(announcement.mailbox, self._ranks, msgspec.json.encode(announcement)):
                return False
            return await_ready(folder, self._ranks, self.options.load_timeout(version.manifest.nbytes))

    def update(self, version: StagedVersion) -> None:
        """EngineRefused if every rank holds what it held before, also by having gone back to it."""
        with receipt_folder(version.folder) as folder:
            self._open_session()
            call, answer = self._send(version, folder)
            self._close_session()
            begun = any_begun(folder)
            # SGLang answers once all tensor ranks are through; other pipeline stages may still be loading.
            seconds = self.options.load_timeout(version.manifest.nbytes) if begun else 0.0
            self.receipts = await_receipts(folder, self._ranks, seconds)
        if not begun:
            what = f"answered {answer.status} {answer.text[:200]}, and no rank came as far as {version.folder}"
            raise self.http.failure(call, what, EngineRefused)
        judge(self.receipts, self._ranks, version.manifest)
        # Flushed with the load: the route of its own takes half a second, in the pause (0.5.23).
        self._unflushed = UNFLUSHED in answer.text
        if answer.status != 200 and not self._unflushed:
            raise EngineDirty(f"load: every rank holds {version.label}, yet SGLang answered {answer.text[:300]}")
        self._warnings += notes(self.receipts)
        more = logs.about(version.manifest.id, event="loaded-by-ranks", engine=self.name)
        log.info("%s: %s: %s", self.name, version.label, "; ".join(notes(self.receipts)), extra=more)

    def finish(self, version: StagedVersion) -> None:
        """The label was not sent with the load, which SGLang takes for a success although a rank may have failed."""
        if self._unflushed:
            super().finish(version)
        else:
            self.set_label(version.label)
            self._say_if_kept()

    def status(self) -> EngineStatus:
        status = super().status()
        self._remember(status.boot_id)
        return status

    def _refuse_unfit(self, version: StagedVersion, step: str) -> Mapping[str, Any]:
        info = super()._refuse_unfit(version, step)
        if LOADER not in (info.get("custom_weight_loader") or []):
            raise EngineRefused(f"start: {self.name} does not know our loader. {PLUGIN}")
        if info.get("dp_size") not in (None, 1):
            raise EngineRefused(f"start: {self.name} has data-parallel replicas, which a tensor update does not reach")
        if drafts := info.get("speculative_draft_model_path"):
            raise EngineRefused(f"start: the draft model {drafts} of {self.name} would keep its old weights")
        self._ranks = int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)
        self._remember(boot_of(info))
        return info

    def _announcement(self, version: StagedVersion, receipts: str) -> Announcement:
        return Announcement(
            folder=version.folder,
            manifest_digest=version.manifest.manifest_digest,
            label=version.label,
            receipts=receipts,
            serves=self._model_info("load", "weight_version"),
            # One for each boot: who listens there is the process that was told to.
            mailbox=open_mailbox(os.path.dirname(version.folder), self._boot),
        )

    def _send(self, version: StagedVersion, receipts: str) -> tuple[Call, Answer]:
        call = Call(
            step="load",
            method="POST",
            path="/update_weights_from_tensor",
            # A payload for each tensor rank; more do no harm. No label: that is for when all ranks have answered.
            json={
                "serialized_named_tensors": [encode(self._announcement(version, receipts))] * self._ranks,
                "load_format": LOADER,
                "selector": "target",
                "flush_cache": self.options.cache == "flush",
            },
            touch="starts",
            accept=frozenset({200, 400}),
            timeout=self.options.load_timeout(version.manifest.nbytes),
            admin=True,
        )
        return call, self.http.send(call)

    def _open_session(self) -> None:
        """SGLang unpacks the weights that it packed, such as quantized ones: from here on they are to be loaded."""
        call = self._session_call("/begin_weight_update", {"selector": "target"}, "starts")
        answer = self.http.send(call)
        if answer.status == 400 and OPEN in answer.text:
            self._close_session()  # of a watcher that died in between
            answer = self.http.send(call)
        if answer.status != 200:
            raise self.http.failure(call, f"answered {answer.status} {answer.text[:300]}")

    def _close_session(self) -> None:
        """SGLang packs them again, whichever they are."""
        self.http.expect(self._session_call("/end_weight_update", {}, "done"), success=True)

    def _session_call(self, path: str, body: Mapping[str, Any], touch: Touch) -> Call:
        accept = frozenset({200, 400})
        return Call(step="load", method="POST", path=path, json=body, touch=touch, accept=accept, admin=True)
