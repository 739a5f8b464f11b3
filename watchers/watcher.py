"""The engine side's loop: discover, stage, verify, pause, load, confirm, record, resume.

    Idle -> Staged -> Paused -> Loading -> Confirmed -> Recorded -> (Probation ->) Serving

Nothing touches the engine before every byte is on this host and verified, and while the engine is paused
the store is not read or written: the receipt goes out right after the resume. See `load` for what a failure
means.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from os import PathLike

from ckptsync import host, logs
from ckptsync.channel import Channel
from ckptsync.engine import Engine, EngineStatus, StagedVersion
from ckptsync.errors import CkptSyncError, Corrupt, EngineError, InvalidInput, InvalidName, NotFound, StoreError
from ckptsync.manifest import Manifest, TensorSpec, check_basename
from ckptsync.signing import Trust
from ckptsync.store.base import Store
from ckptsync.transports.handover import takes_over
from ckptsync.version import VersionId, parse_query

from . import levels
from .discover import AGAIN, AWAY, Backoff, Following, Subscription, VersionsMissed, Wake, local_folder, next_look
from .fast_path import YIELD_SECONDS, FastPath
from .health import IN_RECEIPT, Health, Receipt, describe
from .load import Attempt
from .loop import Loop
from .presence import Presence
from .refusals import Refusals
from .serving import Serving
from .stage import MissingFile, Progress, Stage

log = logs.get(__name__)

Schema = Mapping[str, TensorSpec] | None

_NOT_STAGED = (EngineError, Corrupt, NotFound, StoreError)
"""What may keep a version from the engine before it is touched."""


class Watcher:
    """Keeps one engine on the versions of one channel that it follows. One thread calls `step` or `run`; any may
    ask for `health`, `members`, `silence`, `wake` and, while `run` goes on, `load_version`.

    `follow`     `latest`, `every`, `every:10`, `step>=500`, a version such as `42` or `e2-v42`, or a Subscription
    `stage`      where versions are kept on this host: a Stage, or its folder
    `reader`     this watcher's name in receipts and leases; unique among the channel's readers
    `poll`       seconds between looks at the store
    `events`     let inotify shorten the wait on a local store
    `proof`      the level of proof that a version must pass, 1 to 4, see `watchers.levels`
    `trusted`    content digest -> checksum that a trusted engine reports, for level 3 where nothing is read back
    `allow_cast` load although plain float dtypes differ from the engine's
    `require_signature`
                 public keys, as a PEM file or its text: what none of them signed is not a version
    `patience`   seconds for which files that are listed and absent may still be on their way
    `yields`     seconds for which an engine that somebody else has paused is left to them: a trainer's fast path
    `on_dead`    called once when the engine is left paused and dirty, or does not answer: restart it
    `on_receipt` called after every attempt; `on_change` at every change of health
    `on_failure` called with the engine's name when it or the store kept the watcher from an attempt
    """

    def __init__(
        self,
        root: str | PathLike[str] | Store,
        engine: Engine,
        *,
        follow: str | Subscription = "latest",
        stage: Stage | str,
        reader: str | None = None,
        poll: float = 1.0,
        events: bool = True,
        proof: int = levels.DEFAULT,
        trusted: Mapping[str, str] | None = None,
        allow_cast: bool = False,
        require_signature: str | Trust | None = None,
        patience: float = 60.0,
        yields: float = YIELD_SECONDS,
        progress: Progress | None = None,
        on_dead: Callable[[Health], None] | None = None,
        on_receipt: Callable[[Receipt], None] | None = None,
        on_change: Callable[[Health], None] | None = None,
        on_failure: Callable[[str, CkptSyncError], None] | None = None,
    ) -> None:
        if not hasattr(engine, "status"):
            what = type(engine).__name__
            raise InvalidInput(
                f"{what} is no engine: give an adapter of watchers.engines, such as ModuleEngine(module)"
            )
        self.channel = Channel.open(root, require_signature=require_signature)
        self.engine = engine
        self.stage = Stage(stage) if isinstance(stage, str) else stage
        self.reader = check_basename(reader or f"{socket.gethostname()}-{os.getpid()}", "reader")
        self._following = Following(follow)
        self._poll, self._patience, self._progress = poll, patience, progress
        self._proof = levels.Proof(proof, trusted=trusted, allow_cast=allow_cast)
        self._on_receipt, self._on_change, self._on_failure = on_receipt, on_change, on_failure
        self._wake = Wake(local_folder(self.channel.store.url) if events else None)
        self._loop = Loop(self._wake.set)
        self._refusals = Refusals(patience=patience)
        self._backoff = Backoff(base=min(poll, AGAIN), cap=max(poll, AWAY))
        self._serving = Serving(
            engine,
            proof=self._proof,
            let_go=self.stage.release,
            retry=Backoff(base=min(poll, AGAIN)),
            fast_path=FastPath(self._believes, self._may_be_sending, yields),
            on_change=self._changed,
            on_dead=on_dead and (lambda health: on_dead(self._placed(health))),
        )
        self._presence = Presence(self.channel, self.reader, lambda: self._following.name)

    @property
    def health(self) -> Health:
        """What to tell a probe now; from any thread."""
        return self._placed(self._serving.health)

    @property
    def silence(self) -> float | None:
        """Seconds since `run` should have shown a sign of life (a look, a state, bytes); None unless it runs."""
        return self._loop.silence

    @property
    def proof(self) -> int:
        """The level of proof that a version must pass."""
        return self._proof.level

    def members(self) -> Mapping[str, Health]:
        """The health of each engine by its name: of one."""
        return {self.engine.name: self.health}

    # -- the loop ----------------------------------------------------------------------------------------

    def run(self, stop: threading.Event | None = None) -> None:
        """Step until `stop` is set; without one as long as the process lives. Storage and engine may come and go; a bug
        or an interrupt ends it."""
        stop = stop or threading.Event()
        try:
            with self._loop.running():
                while not stop.is_set():
                    self._loop.answer()
                    _, delay = self._step()
                    self._loop.beat(delay)
                    self._wake.wait(stop, delay)
        finally:
            self._wake.close()

    def wake(self) -> None:
        """Look at the store now; from any thread."""
        self._wake.set()

    def close(self) -> None:
        """Let go of the stage and the observer, and withdraw the receipt. The engine goes on serving what it serves."""
        self._wake.close()
        self.stage.close()
        self._presence.leave()

    def step(self) -> Receipt | None:
        """Look once, and bring the engine to the version that is due. None if nothing was attempted.

        Never raises a CkptSyncError; `health.reason` and the receipt say what went wrong. An interrupt
        (KeyboardInterrupt) is raised again after the way back, with `health` and the receipt already right.
        """
        return self._step()[0]

    def _step(self) -> tuple[Receipt | None, float]:
        with self._scope():
            outcome = self._look()
            self._presence.beat(self._serving.health)
        return outcome

    def _look(self) -> tuple[Receipt | None, float]:
        try:
            with host.refusals(f"{self.engine.name} cannot be watched now"):
                receipt = self._attempt_what_is_due()
        except _NOT_STAGED as error:
            if self._backoff.failures == 0:
                more = {"event": "away", "kind": error.kind}
                log.warning("%s: %s; trying again", self.reader, error, extra=more)
            self._serving.show(reason=str(error), reachable=not isinstance(error, EngineError))
            if self._on_failure is not None:
                self._on_failure(self.engine.name, error)
            return None, self._backoff.failed()
        if self._backoff.failures:
            self._backoff.reset()
            self._serving.show()
        return receipt, next_look(self._poll, self._refusals.soonest(), self._serving.retry_in)

    def load_version(self, text: str | int) -> Receipt:
        """Load one version now, stay on it, and say how it went; `latest` goes back to what was followed before.

        While `run` goes on, its thread does it, between two steps. Waits up to `patience` seconds for files
        that are listed and absent. Raises what went wrong; the engine then serves its old version, unless
        `health` says otherwise, and what is followed is as it was.
        """
        return self._loop.call(lambda: self._load(text))

    def _load(self, text: str | int) -> Receipt:
        with self._scope():
            return self._load_now(self.channel.resolve(text), text)

    def _load_now(self, manifest: Manifest, text: str | int) -> Receipt:
        logs.note(manifest.id)
        self._look_at_engine()
        started = time.monotonic()
        version = self._stage_patiently(manifest)
        attempt, receipt = self._switch_to(version, self.engine.status(), time.monotonic() - started)
        if attempt.state == "serving":
            self._following.loaded(text, manifest.id)
        if attempt.error is not None:
            raise attempt.error
        return receipt

    def _scope(self) -> AbstractContextManager[None]:
        return logs.scope(channel=self.channel.store.url, reader=self.reader, engine=self.engine.name)

    # -- one attempt -------------------------------------------------------------------------------------

    def _attempt_what_is_due(self) -> Receipt | None:
        status = self._look_at_engine()
        others = self._serving.left_to_others
        if not others and (lost := self._serving.lost()) is not None:
            return self._bring_back(lost, status)
        try:
            manifest = self._due()
        except VersionsMissed as error:
            return self._miss(error)
        if manifest is None or (others and not takes_over(manifest)):
            return None
        return self._bring(manifest, status)

    def _bring_back(self, lost: StagedVersion, status: EngineStatus) -> Receipt:
        """What the engine should hold, again. Somebody may have emptied the stage under it, such as whatever tidies up
        temporary folders: then it is staged again."""
        seconds = 0.0
        try:
            if self.stage.find(lost.manifest) is None:
                started = time.monotonic()
                self._stage(self.channel.manifest(lost.manifest.id), self.engine.schema())
                seconds = time.monotonic() - started
        except _NOT_STAGED:
            self._serving.postpone()  # meanwhile a newer version may come
            raise
        return self._switch_to(lost, status, seconds)[1]

    def _look_at_engine(self) -> EngineStatus:
        status, restarted = self._serving.look()
        if restarted:
            self._refusals.engine_restarted()
        return status

    def _due(self) -> Manifest | None:
        return self._following.next(
            self.channel, self._serving.current_id, lambda m: self._refusals.verdict(self.channel, m)
        )

    def _believes(self, version: VersionId) -> bool:
        """Is a label that this watcher has not set a version that a trainer of this channel sent without files?"""
        known = self._serving.current_id or max(self.channel.committed(), default=VersionId(0, 0))
        # Its files may be there before this watcher looks: a label that it saw come was set by a trainer all the same.
        new = version > known or (version == known and self._serving.appeared(version))
        sent = self.channel.newest_sent() if new else None
        return sent is not None and version <= sent and version.epoch == sent.epoch

    def _may_be_sending(self) -> bool:
        """Has a trainer of this channel begun to send what is not in files? A sync that ends in them is told apart."""
        sent = self.channel.newest_sent()
        return sent is not None and sent > max(self.channel.committed(), default=VersionId(0, 0))

    def _bring(self, manifest: Manifest, before: EngineStatus) -> Receipt | None:
        logs.note(manifest.id)
        schema, started = self.engine.schema(), time.monotonic()
        try:
            version = self._stage_newest(manifest, schema)
        except _NOT_STAGED as error:
            return self._refuse(manifest, error)
        status = self.engine.status()
        if status.boot_id != before.boot_id or (status != before and not takes_over(version.manifest)):
            # Staging may take minutes: an engine that was restarted meanwhile, or that a trainer has begun to send
            # to, is looked at anew, next step.
            self._serving.release(version)
            return None
        return self._switch_to(version, status, time.monotonic() - started)[1]

    def _stage_newest(self, manifest: Manifest, schema: Schema) -> StagedVersion:
        """Staged, or what came meanwhile instead, once: a burst is skipped to its end, yet something is
        loaded."""
        version = self._stage(manifest, schema)
        try:
            newer = self._due()
        except (StoreError, VersionsMissed):
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
        self._proof.before(manifest, schema, self.engine)
        self._serving.enter("staging")
        try:
            version = self.stage.stage(self.channel, manifest, self._arrived, reader=self.reader)
        except BaseException:
            self._serving.show()
            raise
        self._serving.enter("staged")
        return version

    def _arrived(self, count: int) -> None:
        self._loop.beat()
        if self._progress is not None:
            self._progress(count)

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
        logs.note(version.manifest.id)
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

    def _changed(self, health: Health) -> None:
        self._loop.beat()
        if self._on_change is not None:
            self._on_change(self._placed(health))

    def _placed(self, health: Health) -> Health:
        """With its place in the channel. Any thread asks, so the store is not read."""
        newest, lag = self.channel.newest, self.channel.lag(self._serving.current_id if health.version else None)
        return replace(health, follow=self._following.name, newest=newest.label if newest else "", lag=lag)

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
            more = logs.about(manifest.id, event="refused", kind=error.kind, **IN_RECEIPT)
            log.warning("%s: %s is not loaded: %s", self.reader, manifest.id, error, extra=more)
        self._serving.explain(str(error))
        receipt = self._receipt(manifest, Attempt(state="refused", error=error), 0.0)
        self._report(receipt)
        return receipt

    def _miss(self, error: VersionsMissed) -> Receipt:
        """Every version was asked for, and some are gone: said once, then on with those that are there."""
        about = logs.about(error.last) if error.last is not None else {}
        more = {**about, "event": "versions-missed", **IN_RECEIPT}
        log.warning("%s: %s", self.reader, error, extra=more)
        health, label = self._serving.health, error.last.label if error.last is not None else ""
        receipt = Receipt(
            version=label, state="refused", label=health.version, since=health.since, engine=self.engine.name,
            error=describe(error),
        )  # fmt: skip
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
            created=manifest.created,
            stage_seconds=stage_seconds,
            pause_seconds=attempt.pause_seconds,
            load_seconds=attempt.load_seconds,
            bytes=manifest.nbytes,
            fingerprint=confirmed.fingerprint if confirmed is not None else "",
            proof=self.proof,
            warnings=confirmed.warnings if confirmed is not None else (),
            error=describe(attempt.error) if attempt.error is not None else None,
        )

    def _report(self, receipt: Receipt) -> None:
        """To the channel, to the log, and to whoever listens."""
        log.info("%s: %s %s", self.reader, receipt.version, receipt.state, extra=receipt.for_log())
        self._presence.report(receipt)
        if self._on_receipt is not None:
            self._on_receipt(receipt)
