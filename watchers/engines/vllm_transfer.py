"""vLLM over HTTP with ckptsync's plugin in it: `--weight-transfer-config '{"backend": "ckptsync"}'`.

The same as `vllm`, but for the load: workers verify before they touch the model, load by the copy plan where it
is proven, read back, and go back by themselves after a failure. Every rank leaves a receipt, and the label is
set when all have. Receipts are files beside the staged version: the engine's workers run on this host, under
this user, as for any staged load.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

from ckptsync.engine import EngineStatus, StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable
from watchers.vllm_plugin.receipts import (
    RankReceipt,
    await_ready,
    await_receipts,
    judge,
    notes,
    receipt_folder,
)

from ._http import Answer, Call
from .vllm import VllmEngine

log = logging.getLogger(__name__)

BACKEND = """Was it started with --weight-transfer-config '{"backend": "ckptsync"}' and VLLM_SERVER_DEV_MODE=1?"""
AWAKE = re.compile(r'^vllm:engine_sleep_state\{[^}]*sleep_state="awake"[^}]*\} (\S+)$', re.MULTILINE)
NO_RECEIPT_SECONDS = 1.0
"""After an error without any receipt: no worker of ours has seen the call."""


class VllmTransferEngine(VllmEngine):
    """One vLLM server that has the plugin, behind the engine contract."""

    receipts: list[RankReceipt] = []  # noqa: RUF012 - replaced, never changed
    """Of the last update: which way each rank loaded, and how it proved it."""

    _boot = ""
    _checksums = False
    _slept, _wakes = False, 0

    def prepare(self, version: StagedVersion) -> bool:
        """Before the pause: let every rank gather the version into pinned memory. False if that was not to be
        had in time; the update then does it."""
        info = {"folder": version.folder, "manifest_digest": version.manifest.manifest_digest}
        with receipt_folder(version.folder) as folder:
            call = Call(
                step="prepare",
                method="POST",
                path="/init_weight_transfer_engine",
                json={"init_info": {**info, "receipts": folder}},
                admin=True,
                remedy=BACKEND,
            )
            self.http.send(call)
            return await_ready(folder, self._ranks(), self.options.load_timeout(version.manifest.nbytes))

    def start(self, version: StagedVersion) -> None:
        """Opens vLLM's session; the model is not touched. EngineRefused while it sleeps or computes."""
        super().start(version)
        if self._asleep():
            raise EngineRefused(f"start: {self.name} sleeps; its weights are loaded again after it wakes up")
        call = Call(
            step="start",
            method="POST",
            path="/start_weight_update",
            accept=frozenset({200, 500}),
            admin=True,
            remedy=BACKEND,
        )
        if self.http.send(call).status == 500:
            self._renew_connection()
            self._end_session()  # of a watcher that died between start and finish
            answer = self.http.send(call)
            if answer.status != 200:
                raise self.http.failure(call, f"answered {answer.status}: {answer.text[:300]}")

    def update(self, version: StagedVersion) -> None:
        """EngineRefused if every rank holds what it held before, also by having gone back to it."""
        ranks = self._ranks()
        with receipt_folder(version.folder) as folder:
            call, answer = self._send(version, folder)
            if answer.status != 200:
                self._renew_connection()
            # vLLM answers with the first rank's error, while others may be loading still.
            known = await_receipts(folder, 1, NO_RECEIPT_SECONDS)
            seconds = self.options.load_timeout(version.manifest.nbytes) if known else 0.0
            self.receipts = await_receipts(folder, ranks, seconds)
        if not self.receipts:
            raise self.http.failure(call, f"answered {answer.status} {answer.text[:200]} and no rank left a receipt")
        judge(self.receipts, ranks, version.manifest)
        if answer.status != 200:
            raise EngineDirty(f"load: every rank holds {version.label}, yet vLLM answered {answer.text[:300]}")
        self._warnings += notes(self.receipts)
        log.info("%s: %s: %s", self.name, version.label, "; ".join(notes(self.receipts)))

    def set_label(self, label: str) -> None:
        call = Call(
            step="label",
            method="POST",
            path="/finish_weight_update",
            json={"weight_version": label},
            touch="done",
            admin=True,
        )
        self.http.send(call)

    def status(self) -> EngineStatus:
        """EngineUnavailable while it sleeps. Awake again it counts as restarted: at level 2 it has lost its
        weights and kept its label."""
        if self._asleep():
            self._slept = True
            raise EngineUnavailable(f"status: {self.name} sleeps")
        if self._slept:
            self._slept, self._wakes = False, self._wakes + 1
        status = super().status()
        if self._wakes:
            status = replace(status, boot_id=f"{status.boot_id}+{self._wakes}")
        if status.boot_id != self._boot:
            self._boot, self._checksums = status.boot_id, False
        return status

    def _asleep(self) -> bool:
        """From the metrics: `/is_sleeping` (0.32) also says yes to a mere pause."""
        call = Call(step="status", method="GET", path="/metrics", accept=frozenset({200, 404}))
        return any(float(awake) == 0 for awake in AWAKE.findall(self.http.send(call).text))

    def _fingerprint(self, version: StagedVersion) -> str:
        """Where the values were not read back, vLLM's own checksum; always, once it was needed: one engine's
        fingerprints are compared with each other."""
        if any(receipt.proof == "none" for receipt in self.receipts):
            self._checksums = True
        return super()._fingerprint(version) if self._checksums else ""

    def _send(self, version: StagedVersion, receipts: str) -> tuple[Call, Answer]:
        info = {
            "folder": version.folder,
            "manifest_digest": version.manifest.manifest_digest,
            "label": version.label,
            "receipts": receipts,
        }
        call = Call(
            step="load",
            method="POST",
            path="/update_weights",
            json={"update_info": info},
            touch="starts",
            accept=frozenset({200, 500}),
            timeout=self.options.load_timeout(version.manifest.nbytes),
            admin=True,
            remedy=BACKEND,
        )
        return call, self.http.send(call)

    def _renew_connection(self) -> None:
        """vLLM 0.32 resets the connection after a 500, when the next request is on its way already. A GET is safe
        to repeat, and is repeated; a POST is not."""
        self._paused("status")

    def _ranks(self) -> int:
        call = Call(step="ranks", method="GET", path="/get_world_size", params={"include_dp": "true"}, admin=True)
        found = self.http.json_object(call).get("world_size")
        if not isinstance(found, int) or found < 1:
            raise self.http.failure(call, f"answered world_size {found!r}")
        return found

    def _end_session(self) -> None:
        call = Call(step="start", method="POST", path="/finish_weight_update", accept=frozenset({200, 500}), admin=True)
        self.http.send(call)
