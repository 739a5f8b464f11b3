"""The engine side's loop: discover, stage, verify, pause, load, confirm, record, resume.

    Idle -> Staged -> Paused -> Loading -> Confirmed -> Recorded -> Serving

Nothing touches the engine before every byte is on this host and verified, and while the engine is paused
the store is not read or written: the receipt goes out right after the resume. See `load` for what a failure
means.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

from ckptsync.channel import Channel
from ckptsync.engine import Engine, EngineStatus, StagedVersion
from ckptsync.errors import CkptSyncError, Corrupt, EngineError, InvalidName, NotFound, StoreError
from ckptsync.manifest import Manifest, TensorSpec, check_basename
from ckptsync.store.base import Store
from ckptsync.version import VersionId, parse_query

from .discover import Backoff, Wake, local_folder, subscribe
from .health import Health, Receipt, describe
from .load import Attempt
from .proof import check_schema
from .refusals import Refusals
from .serving import Serving
from .stage import MissingFile, Progress, Stage

log = logging.getLogger(__name__)

Schema = Mapping[str, TensorSpec] | None

_NOT_STAGED = (EngineError, Corrupt, NotFound, StoreError)
"""What may keep a version from the engine before it is touched."""


class Watcher:
    """Keeps one engine on the versions of one channel that it follows. One thread calls `step`, `run`,
    `load_version`.

    `follow`     `latest`, `every`, or a version such as `42` or `e2-v42`
    `stage`      where versions are kept on this host: a Stage, or its folder
    `reader`     this watcher's name in receipts and leases; unique among the channel's readers
    `poll`       seconds between looks at the store
    `events`     let inotify shorten the wait on a local store
    `allow_cast` load although plain float dtypes differ from the engine's
    `patience`   seconds for which files that are listed and absent may still be on their way
    `on_dead`    called once when the engine is left paused and dirty: restart it
    `on_receipt` called after every attempt; `on_change` at every change of health
    """

    def __init__(
        self,
        root: str | Store,
        engine: Engine,
        *,
        follow: str = "latest",
        stage: Stage | str,
        reader: str | None = None,
        poll: float = 1.0,
        events: bool = True,
        allow_cast: bool = False,
        patience: float = 60.0,
        progress: Progress | None = None,
        on_dead: Callable[[Health], None] | None = None,
        on_receipt: Callable[[Receipt], None] | None = None,
        on_change: Callable[[Health], None] | None = None,
    ) -> None:
        self.channel = Channel.open(root)
        self.engine = engine
        self.stage = Stage(stage) if isinstance(stage, str) else stage
        self.reader = check_basename(reader or f"{socket.gethostname()}-{os.getpid()}", "reader")
        self._subscription = subscribe(follow)
        self._poll, self._patience, self._allow_cast, self._progress = poll, patience, allow_cast, progress
        self._on_receipt = on_receipt
        self._wake = Wake(local_folder(self.channel.store.url) if events else None)
        self._refusals = Refusals(patience=patience)
        self._backoff = Backoff(base=poll)
        self._serving = Serving(
            engine, let_go=self.stage.release, retry=Backoff(base=poll), on_change=on_change, on_dead=on_dead
        )
        self._receipt_failed = False

    @property
    def health(self) -> Health:
        """What to tell a probe now; from any thread."""
        return self._serving.health

    # -- the loop ----------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set. Storage and engine may come and go; a bug or an interrupt ends it."""
        try:
            while not stop.is_set():
                _, delay = self._step()
                self._wake.wait(stop, delay)
        finally:
            self._wake.close()

    def wake(self) -> None:
        """Look at the store now; from any thread."""
        self._wake.set()

    def close(self) -> None:
        """Let go of the stage and of the observer. The engine goes on serving what it serves."""
        self._wake.close()
        self.stage.close()

    def step(self) -> Receipt | None:
        """Look once, and bring the engine to the version that is due. None if nothing was attempted.

        Never raises a CkptSyncError; `health.reason` and the receipt say what went wrong. An interrupt
        (KeyboardInterrupt) is raised again after the way back, with `health` and the receipt already right.
        """
        return self._step()[0]

    def _step(self) -> tuple[Receipt | None, float]:
        try:
            receipt = self._attempt_what_is_due()
        except _NOT_STAGED as error:
            if self._backoff.failures == 0:
                log.warning("%s: %s; trying again", self.reader, error)
            self._serving.show(reason=str(error), reachable=not isinstance(error, EngineError))
            return None, self._backoff.failed()
        if self._backoff.failures:
            self._backoff.reset()
            self._serving.show()
        return receipt, self._poll

    def load_version(self, text: str) -> Receipt:
        """Load one version now, whatever is followed, and say how it went.

        Waits up to `patience` seconds for files that are listed and absent. Raises what went wrong; the
        engine then serves its old version, unless `health` says otherwise.
        """
        manifest = self.channel.resolve(text)
        self._look_at_engine()
        started = time.monotonic()
        version = self._stage_patiently(manifest)
        attempt, receipt = self._switch_to(version, self.engine.status(), time.monotonic() - started)
        if attempt.error is not None:
            raise attempt.error
        return receipt

    # -- one attempt -------------------------------------------------------------------------------------

    def _attempt_what_is_due(self) -> Receipt | None:
        status = self._look_at_engine()
        if (lost := self._serving.lost()) is not None:
            return self._switch_to(lost, status, stage_seconds=0.0)[1]
        manifest = self._due()
        return self._bring(manifest, status.boot_id) if manifest is not None else None

    def _look_at_engine(self) -> EngineStatus:
        status, restarted = self._serving.look()
        if restarted:
            self._refusals.engine_restarted()
        return status

    def _due(self) -> Manifest | None:
        return self._subscription.next(
            self.channel, self._serving.current_id, lambda m: self._refusals.verdict(self.channel, m)
        )

    def _bring(self, manifest: Manifest, boot_id: str) -> Receipt | None:
        schema, started = self.engine.schema(), time.monotonic()
        try:
            version = self._stage_newest(manifest, schema)
        except _NOT_STAGED as error:
            return self._refuse(manifest, error)
        status = self.engine.status()
        if status.boot_id != boot_id:
            # Staging may take minutes: an engine that was restarted meanwhile is looked at anew, next step.
            self._serving.release(version)
            return None
        return self._switch_to(version, status, time.monotonic() - started)[1]

    def _stage_newest(self, manifest: Manifest, schema: Schema) -> StagedVersion:
        """Staged, or what came meanwhile instead, once: a burst is skipped to its end, yet something is
        loaded."""
        version = self._stage(manifest, schema)
        try:
            newer = self._due()
        except StoreError:
            return version
        if newer is None or newer.id == manifest.id:
            return version
        try:
            newer_version = self._stage(newer, schema)
        except _NOT_STAGED as error:
            self._refuse(newer, error)
            return version
        self._serving.release(version)
        return newer_version

    def _stage(self, manifest: Manifest, schema: Schema) -> StagedVersion:
        # The schema first: it needs no bytes.
        check_schema(manifest, schema, allow_cast=self._allow_cast, engine=self.engine.name)
        self._serving.enter("staging")
        try:
            version = self.stage.stage(self.channel, manifest, self._progress, reader=self.reader)
        except BaseException:
            self._serving.show()
            raise
        self._serving.enter("staged")
        return version

    def _stage_patiently(self, manifest: Manifest) -> StagedVersion:
        deadline, backoff, schema = time.monotonic() + self._patience, Backoff(), self.engine.schema()
        while True:
            try:
                return self._stage(manifest, schema)
            except MissingFile:
                delay = backoff.failed()
                if time.monotonic() + delay > deadline:
                    raise
                time.sleep(delay)

    def _switch_to(self, version: StagedVersion, status: EngineStatus, stage_seconds: float) -> tuple[Attempt, Receipt]:
        current = self._serving.current
        last_good = None if version is current else current or self._found(status)
        attempt = self._serving.change(version, status, last_good)
        self._learn(version, attempt, again=version is current)
        receipt = self._receipt(version.manifest, attempt, stage_seconds)
        self._report(receipt)
        if attempt.interrupt is not None:
            raise attempt.interrupt
        return attempt, receipt

    def _found(self, status: EngineStatus) -> StagedVersion | None:
        """What an engine that outlived its watcher says it serves, if it is in the stage: somewhere to go
        back to."""
        try:
            epoch, number = parse_query(status.label)
            if epoch is None or number is None:
                return None
            return self.stage.find(self.channel.manifest(VersionId(epoch, number)))
        except (InvalidName, NotFound, Corrupt, StoreError):
            return None

    # -- what an attempt leaves behind -------------------------------------------------------------------

    def _learn(self, version: StagedVersion, attempt: Attempt, *, again: bool) -> None:
        if attempt.state == "serving":
            self._refusals.worked(version.manifest)
            if attempt.error is None:
                self._serving.explain(self._refusals.why_not_newer(version.manifest.id))
        elif attempt.error is not None and attempt.interrupt is None and not again:
            self._refusals.add(self.channel, version.manifest, attempt.error, died=attempt.died)

    def _refuse(self, manifest: Manifest, error: CkptSyncError) -> Receipt:
        """The engine was not touched."""
        if self._refusals.add(self.channel, manifest, error):
            log.warning("%s: %s is not loaded: %s", self.reader, manifest.id, error)
        self._serving.explain(str(error))
        receipt = self._receipt(manifest, Attempt(state="refused", error=error), 0.0)
        self._report(receipt)
        return receipt

    def _receipt(self, manifest: Manifest, attempt: Attempt, stage_seconds: float) -> Receipt:
        confirmed = attempt.confirmation
        return Receipt(
            version=manifest.id.label,
            state=attempt.state,
            label=self.health.version,
            since=self.health.since,
            engine=self.engine.name,
            stage_seconds=stage_seconds,
            pause_seconds=attempt.pause_seconds,
            load_seconds=attempt.load_seconds,
            bytes=manifest.nbytes,
            fingerprint=confirmed.fingerprint if confirmed is not None else "",
            warnings=confirmed.warnings if confirmed is not None else (),
            error=describe(attempt.error) if attempt.error is not None else None,
        )

    def _report(self, receipt: Receipt) -> None:
        """To the channel, if it can be written, and to whoever listens. Never in the way of a load."""
        try:
            self.channel.write_receipt(self.reader, receipt.as_dict())
            self._receipt_failed = False
        except CkptSyncError as error:  # also a bucket that is gone, or a name that is contended
            if not self._receipt_failed:
                log.warning("%s: no receipt can be written: %s", self.reader, error)
            self._receipt_failed = True
        if self._on_receipt is not None:
            self._on_receipt(receipt)
