"""Many replicas under one watcher: looked for and staged once on this host, then loaded by each on its own.

Each member is a Watcher in a thread of its own, with its own state, way back, back-off and receipts; the fleet
decides which version is due and whose turn it is (see `rollout`). So a replica that hangs, dies or refuses is
isolated by construction: no other waits for it, save for its place in a rolling batch, until its deadline.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from os import PathLike

from ckptsync import host, logs
from ckptsync.channel import Channel
from ckptsync.engine import Engine, StagedVersion
from ckptsync.errors import CkptSyncError, Corrupt, NotFound, StoreError
from ckptsync.manifest import Manifest, check_basename
from ckptsync.signing import Trust
from ckptsync.store.base import Store
from ckptsync.version import VersionId, parse_label

from .discover import AGAIN, AWAY, Backoff, Following, Wake, local_folder, next_look
from .health import IN_RECEIPT, Health, Receipt, State, describe
from .members import Member, Members, about
from .refusals import Refusals
from .rollout import Directed, Quorum, Rollout
from .roster import Roster
from .stage import Progress, Stage
from .watcher import Watcher

log = logs.get(__name__)

MAJORITY = Quorum(51, percent=True)

_NOT_STAGED = (Corrupt, NotFound, StoreError)


class Fleet:
    """Keeps the engines of a roster on the versions of one channel. One thread calls `step` or `run`.

    The same surface as a Watcher, and `members`. What differs:

    `connect`     makes the adapter for an engine's URL; the same options for all, so that all decide alike
    `stage`       a folder; every member holds what it serves there by itself
    `reader`      each member's is this, a dot, and its host and port
    `member`      makes a member's watcher: `partial(Watcher, allow_cast=True)` sets an option for all
    `at_once`     None: all at the same time; N: in batches of N
    `quorum`      so many members make a version the fleet's, and the fleet ready
    `deadline`    seconds from a member's turn to its outcome, after which the others wait for it no longer
    `on_receipt`, `on_dead`
                  called from the members' threads, one call at a time
    """

    def __init__(
        self,
        root: str | PathLike[str] | Store,
        roster: Roster,
        connect: Callable[[str], Engine],
        *,
        follow: str = "latest",
        stage: str,
        reader: str | None = None,
        poll: float = 1.0,
        events: bool = True,
        member: Callable[..., Watcher] = Watcher,
        patience: float = 60.0,
        at_once: int | None = None,
        quorum: Quorum = MAJORITY,
        deadline: float = 600.0,
        require_signature: str | Trust | None = None,
        progress: Progress | None = None,
        on_dead: Callable[[Health], None] | None = None,
        on_receipt: Callable[[Receipt], None] | None = None,
        on_change: Callable[[Health], None] | None = None,
        on_failure: Callable[[str, CkptSyncError], None] | None = None,
    ) -> None:
        self.channel, self.stage = Channel.open(root, require_signature=require_signature), Stage(stage)
        self.reader = check_basename(reader or f"{socket.gethostname()}-{os.getpid()}", "reader")
        self.rollout: Rollout | None = None
        self._connect, self._following = connect, Following(follow)
        self._poll, self._member, self._progress = poll, member, progress
        self._at_once, self._quorum, self._deadline = at_once, quorum, deadline
        self._in_order = at_once is not None or follow.startswith("every")
        self._on_dead, self._on_receipt, self._on_change = on_dead, on_receipt, on_change
        self._on_failure = on_failure
        self._wake = Wake(local_folder(self.channel.store.url) if events else None)
        self._refusals, self._backoff = Refusals(patience=patience), Backoff(base=min(poll, AGAIN), cap=max(poll, AWAY))
        self._members = Members(roster, self._watch, stage=stage, who=self.channel.store.url)
        self._held: dict[VersionId, StagedVersion] = {}
        self._health, self._live, self._trouble, self._staging = Health(), "", "", False
        self._running, self._expected, self._look_at = False, 0.0, 0.0
        self._steering = threading.RLock()
        self._news = threading.Condition()
        self._reporting = threading.Lock()

    @property
    def health(self) -> Health:
        """Of the fleet: ready while a quorum serves its version or the one that is coming. From any thread."""
        return self._placed(self._health)

    def members(self) -> Mapping[str, Health]:
        """Each member's own, by its engine's name, as in receipts. From any thread."""
        return {member.name: self._placed(self._health_of(member)) for member in self._members.present()}

    @property
    def silence(self) -> float | None:
        """Seconds since `run` should have shown a sign of life; None unless it runs. From any thread. A member that
        hangs does not silence the fleet: that is what its deadline is for."""
        return max(0.0, time.monotonic() - self._expected) if self._running else None

    def _health_of(self, member: Member) -> Health:
        """One whose deadline has passed is not ready, whatever it was before it hung."""
        rollout = self.rollout
        if rollout is None or member.url not in rollout.overdue:
            return member.health
        return replace(member.health, ready=False, reason=rollout.failed.get(member.url, ""))

    def _placed(self, health: Health) -> Health:
        """With its place in the channel, which the fleet alone looks at."""
        newest, lag = self.channel.newest, self.channel.lag(parse_label(health.version))
        return replace(health, follow=self._following.name, newest=newest.label if newest else "", lag=lag)

    def _serving(self) -> list[str]:
        return [member.url for member in self._members.present() if self._health_of(member).ready]

    # -- the loop ----------------------------------------------------------------------------------------

    def run(self, stop: threading.Event | None = None) -> None:
        """Step until `stop` is set; without one as long as the process lives. Storage, engines and sources of engines
        may come and go."""
        stop = stop or threading.Event()
        self._beat()
        self._running = True
        try:
            while not stop.is_set():
                self.step()
                # Such as an engine that somebody else follows, or a source that is away.
                mended = AWAY if self._members.problems else float("inf")
                delay = next_look(self._poll, self._refusals.soonest(), self._look_in(), mended)
                self._beat(delay)
                self._wake.wait(stop, delay)
        finally:
            self._running = False
            self._wake.close()

    def _look_in(self) -> float:
        """Seconds until the store is to be looked at again; infinity unless it was away."""
        return self._look_at - time.monotonic() if self._backoff.failures else float("inf")

    def wake(self) -> None:
        """Look at the store and the roster now; from any thread."""
        self._look_at = 0.0
        self._wake.set()

    def close(self) -> None:
        """End every member after what it is at now, which takes `deadline` seconds at most. The engines go on
        serving what they serve."""
        self._wake.close()
        self._members.close(self._deadline)
        self.stage.close()

    def step(self) -> Receipt | None:
        """Look once at the roster and the store, and begin the rollout that is due; members go on by themselves.

        The receipt of a version that is refused for all of them, since it cannot be staged; else None.
        """
        with self._steering:
            self._muster()
            if self.rollout is not None:
                self.rollout.check_deadlines()
            # A store that is away is asked less and less often, the roster at every poll all the same.
            with self._scope():
                receipt = self._look() if time.monotonic() >= self._look_at else None
            self._note()
        return receipt

    def load_version(self, text: str | int) -> Receipt:
        """Load one version now, everywhere, and stay on it; `latest` goes back to what was followed before.

        From any thread. Returns when a quorum has it. Raises what keeps it from being staged. Where no quorum confirms
        it within the deadline, or none can any more and nobody is at it, EngineDirty if a load failed on the way or is
        not over, else EngineUnavailable if engines did not answer, else EngineRefused; what is followed is then as it
        was.
        """
        with self._steering, self._scope():  # nothing else begins meanwhile
            manifest, started = self.channel.resolve(text), time.monotonic()
            logs.note(manifest.id)
            self._muster()
            rollout = self._begin(self._stage(manifest), back=True)
            staged = time.monotonic()
            self._wait_for_outcome(rollout)
            if not self._has_quorum(rollout):
                raise rollout.no_quorum(self.health.reason)
            self._following.loaded(text, manifest.id)
        return self._receipt(manifest, staged - started, time.monotonic() - staged)

    def _scope(self) -> AbstractContextManager[None]:
        return logs.scope(channel=self.channel.store.url, reader=self.reader)

    def _wait_for_outcome(self, rollout: Rollout) -> None:
        """Until a quorum has confirmed its version, or none can come any more."""
        until, look_at = time.monotonic() + self._deadline, 0.0
        while not self._has_quorum(rollout) and time.monotonic() < until:
            self._beat()
            rollout.check_deadlines()
            members = [member.url for member in self._members.present()]
            if not rollout.can_reach(self._quorum.of(len(members)), members):
                break
            if time.monotonic() >= look_at:
                # Who has been away for long looks less and less often, and is to be heard of in a few polls.
                self._members.wake()
                look_at = time.monotonic() + self._poll
            with self._news:
                self._news.wait(0.2)
        self._note()

    def _has_quorum(self, rollout: Rollout) -> bool:
        return len(rollout.holders) >= self._quorum.of(len(self._members.present()))

    def _look(self) -> Receipt | None:
        try:
            with host.refusals("no version can be staged now"):
                receipt = self._begin_what_is_due()
        except _NOT_STAGED as error:
            if self._backoff.failures == 0:
                log.warning("%s: %s; trying again", self.reader, error, extra={"event": "away"})
            self._failed("fleet", error)
            self._trouble, self._look_at = str(error), time.monotonic() + self._backoff.failed()
            return None
        self._backoff.reset()
        if receipt is None:
            due = self.rollout.target.id if self.rollout is not None else VersionId(0, 0)
            self._trouble = self._refusals.why_not_newer(due)
        return receipt

    def _begin_what_is_due(self) -> Receipt | None:
        rollout = self.rollout
        if rollout is not None and self._in_order and not rollout.settled(self._serving()):
            return None
        manifest = self._following.next(
            self.channel,
            rollout.target.id if rollout is not None else None,
            lambda manifest: self._refusals.verdict(self.channel, manifest),
        )
        if manifest is None:
            return None
        logs.note(manifest.id)
        try:
            version = self._stage(manifest)
        except _NOT_STAGED as error:
            return self._refuse(manifest, error)
        self._refusals.worked(manifest)
        self._begin(version)
        return None

    def _stage(self, manifest: Manifest) -> StagedVersion:
        self._staging = True
        self._note()
        try:
            return self.stage.stage(self.channel, manifest, self._arrived, reader=self.reader)
        finally:
            self._staging = False

    def _arrived(self, count: int) -> None:
        self._beat()
        if self._progress is not None:
            self._progress(count)

    def _beat(self, rest: float = 0.0) -> None:
        self._expected = time.monotonic() + rest

    def _begin(self, version: StagedVersion, *, back: bool = False) -> Rollout:
        """From now on `version` is due. The one before is held for who joins while this one is not proven."""
        last, before = self.rollout, None
        if last is not None:
            last.end()
            before = last.target if last.proven else last.before
        self._held[version.manifest.id] = version
        self.rollout = Rollout(
            version.manifest, at_once=self._at_once, deadline=self._deadline, before=before, back=back
        )  # fmt: skip
        for unused in set(self._held) - {version.manifest.id} - ({before.id} if before is not None else set()):
            self.stage.release(self._held.pop(unused))
        self._members.wake()
        return self.rollout

    def _refuse(self, manifest: Manifest, error: CkptSyncError) -> Receipt:
        """No engine was touched."""
        if self._refusals.add(self.channel, manifest, error):
            log.warning(
                "%s: %s is not loaded: %s",
                self.reader,
                manifest.id,
                error,
                extra=logs.about(manifest.id, event="refused", kind=error.kind, **IN_RECEIPT),
            )
        self._trouble = str(error)
        receipt = replace(self._receipt(manifest, 0.0, 0.0), state="refused", error=describe(error))
        try:
            self.channel.write_receipt(self.reader, receipt.as_dict())
        except CkptSyncError as unwritten:
            log.warning("%s: no receipt can be written: %s", self.reader, unwritten, extra={"event": "no-receipt"})
        self._pass_on(receipt)
        return receipt

    def _receipt(self, manifest: Manifest, stage_seconds: float, load_seconds: float) -> Receipt:
        return Receipt(
            version=manifest.id.label,
            state="serving",
            label=self._live,
            since=self.health.since,
            engine=f"fleet of {len(self._members.present())}",
            created=manifest.created,
            stage_seconds=stage_seconds,
            load_seconds=load_seconds,
            bytes=manifest.nbytes,
            proof=min((member.watcher.proof for member in self._members.present()), default=0),
        )

    # -- members -----------------------------------------------------------------------------------------

    def _muster(self) -> None:
        for url in self._members.look():
            if self.rollout is not None:
                self.rollout.left(url)

    def _watch(self, url: str) -> Watcher:
        return self._member(
            self.channel.store,
            self._connect(url),
            follow=Directed(url, lambda: self.rollout),
            stage=self.stage.folder,
            reader=f"{self.reader}.{_slug(url)}",
            poll=self._poll,
            events=False,
            on_dead=self._dead,
            on_receipt=lambda receipt: self._told(url, receipt),
            on_change=lambda _: self._note(),
            on_failure=lambda name, error: self._kept(url, name, error),
            require_signature=self.channel.trust,
        )

    def _kept(self, url: str, name: str, error: CkptSyncError) -> None:
        """A member's engine does not answer, and nothing was attempted."""
        self._failed(name, error)
        if self.rollout is not None and self.rollout.withdraws(url):
            self._members.wake(but=url)

    def _failed(self, name: str, error: CkptSyncError) -> None:
        if self._on_failure is not None:
            with self._reporting:
                self._on_failure(name, error)

    def _told(self, url: str, receipt: Receipt) -> None:
        if self.rollout is not None:
            self.rollout.tell(url, receipt)
        self._note()
        self._members.wake(but=url)  # the next batch may begin
        self._pass_on(receipt)

    def _pass_on(self, receipt: Receipt) -> None:
        if self._on_receipt is not None:
            with self._reporting:
                self._on_receipt(receipt)

    def _dead(self, health: Health) -> None:
        if self._on_dead is not None:
            with self._reporting:
                self._on_dead(health)

    # -- health ------------------------------------------------------------------------------------------

    def _note(self) -> None:
        """Something may have changed: say so to whoever waits or listens."""
        with self._news:
            members, rollout = self._members.present(), self.rollout
            need = self._quorum.of(len(members))
            if rollout is not None and self._has_quorum(rollout):
                self._live = rollout.target.id.label
            coming = {self._live, rollout.target.id.label} - {""} if rollout is not None else set()
            ahead = rollout.ahead if rollout is not None else set()
            healths = [(self._health_of(member), member.url in ahead) for member in members]
            able = sum(health.ready and (health.version in coming or newer) for health, newer in healths)
            ready = bool(self._live) and able >= need
            state: State = "serving" if ready else "staging" if self._staging else "idle"
            reason = self._why(members, rollout, need)
            health = replace(self._health, ready=ready, version=self._live, state=state, reason=reason)
            changed = health != self._health
            if changed:
                self._health = replace(health, since=time.time()) if state != self._health.state else health
            self._news.notify_all()
        if changed and self._on_change is not None:
            self._on_change(self._health)

    def _why(self, members: list[Member], rollout: Rollout | None, need: int) -> str:
        """Of all that is not well: the store, the roster, the rollout, and each straggler by name."""
        problems = [self._trouble, *self._members.problems]
        if not members:
            problems.append("no engine is known")
        if rollout is None:
            problems.append("no version has been loaded yet")
        else:
            behind = [m for m in members if m.url not in rollout.holders or not self._health_of(m).ready]
            if behind:
                done = f"{len(members) - len(behind)} of {len(members)} serve {rollout.target.id.label}, of {need}"
                problems.append(done + (": stopped at its first batch" if rollout.stopped else ""))
            problems += [about(m, rollout.failed.get(m.url) or m.health.reason or "to come") for m in behind]
        return "; ".join(problem for problem in problems if problem)


def _slug(url: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", url.rpartition("://")[2]).strip("-.")
