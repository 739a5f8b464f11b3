"""vLLM over HTTP with ckptsync's plugin in it: `--weight-transfer-config '{"backend": "ckptsync"}'`.

The same as `vllm`, but for the load: workers verify before they touch the model, load by the copy plan where it
is proven, read back, and go back by themselves after a failure. Every rank leaves a receipt, and the label is
set when all have. Receipts are files beside the staged version: the engine's workers run on this host, under
this user, as for any staged load.
"""

from __future__ import annotations

from ckptsync import logs
from ckptsync.engine import EngineStatus, StagedVersion
from ckptsync.engine_http import Answer, Call
from ckptsync.errors import EngineDirty
from watchers.live.receipts import (
    await_ready,
    await_receipts,
    judge,
    notes,
    receipt_folder,
)

from ._proof import RankProof
from .vllm import VllmEngine

log = logs.get(__name__)

BACKEND = """Was it started with --weight-transfer-config '{"backend": "ckptsync"}' and VLLM_SERVER_DEV_MODE=1?"""
NO_RECEIPT_SECONDS = 1.0
"""After an error without any receipt: no worker of ours has seen the call."""


class VllmTransferEngine(RankProof, VllmEngine):
    """One vLLM server that has the plugin, behind the engine contract."""

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
        more = logs.about(version.manifest.id, event="loaded-by-ranks", engine=self.name)
        log.info("%s: %s: %s", self.name, version.label, "; ".join(notes(self.receipts)), extra=more)

    def end_update(self) -> None:
        """Before caches are dropped: a flush does not belong into an open session."""
        call = Call(step="finish", method="POST", path="/finish_weight_update", json={}, touch="done", admin=True)
        self.http.send(call)

    def status(self) -> EngineStatus:
        status = super().status()
        self._remember(status.boot_id)
        return status

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
