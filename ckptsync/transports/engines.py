"""The engines of a sync as all ranks see them: who is paused by us, who may hold a mix, who holds which version.

Rank 0 asks, every rank hears the same: an engine is in the same state on every rank, so every rank decides the same.
An engine in the trainer's own process is asked on every rank, and its answer is what all of them say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import wait
from functools import partial
from typing import Any

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from .. import logs
from ..engine import EngineStatus
from ..errors import CkptSyncError, EngineDirty, EngineError, EngineUnavailable, ProofFailed, SchemaMismatch
from ..lane import once
from ..ranks import Ranks
from ..version import VersionId
from .base import Delivery, LocalEngine, SyncEngine
from .control import url_of
from .fit import check_fits, check_newer
from .given import check_engines
from .receivers import HttpEngine

log = logs.get(__name__)

Answers = dict[str, Any]
"""Engine -> what it answered, or the CkptSyncError."""

NONE = VersionId(0, -1)
"""Older than any version."""

ENDLESS = VersionId(1 << 30, 0)
"""Newer than any version."""

RESUME_TRIES = 3

SHORT_SECONDS = 5.0
"""What one that was silent in the sync before gets for its answer. Of others the log says then that they keep us."""


class Engines:
    """Every method is collective.

    An engine may be *silent*: it let the time for an answer pass, in this sync. It is not asked again in it, by anybody
    but a transport that does not pause, which waits for it as long as it was told. In the next sync it gets one short
    question; and at once if what timed out was no mere question, but a pause or a part of a send. What it may hold, and
    that it may be paused by us, is remembered meanwhile.
    """

    def __init__(self, engines: Sequence[SyncEngine], ranks: Ranks) -> None:
        check_engines(engines)
        self.all, self._ranks = tuple(engines), ranks
        self.dirty: dict[str, VersionId] = {}
        """Touched by a send of this version that was not confirmed: maybe a mix, so nobody here resumes them."""
        self.held: set[str] = set()
        """Paused by us, so nobody else is loading them."""
        self.silent: dict[str, EngineError] = {}
        """Engine -> what it did not answer, in this sync."""
        self._doubted: set[str] = set()
        """Silent before, or too late for more than a question: their next answer is waited for shortly."""
        self._foreign: set[str] = set()
        """Reported the number that is being sent before it was: the label of another channel, which says nothing of
        ours until it is confirmed."""

    def doubt(self) -> None:
        """The silent ones get one short question more: at the start of a sync."""
        self._doubted |= self.silent.keys()
        self.silent = {}

    def suspect(self, addresses: Set[str]) -> None:
        """These did not answer a transport, the same on every rank. They get one short question: an engine that was
        just too late holds the version."""
        if wanted := addresses - {""}:
            self._doubted |= {engine.name for engine in self.all if _address(engine) in wanted}

    def look(self) -> Mapping[str, EngineStatus | CkptSyncError]:
        """What each says of itself, or why it says nothing; who turns out to be clean is no longer dirty.

        That is one that reports the version which was sent to it, or a newer one: the label comes after the data. And
        one that computes, though we left it paused: a watcher has loaded it completely, or it was restarted.
        """
        found = self._ask(self.all, lambda engine: engine.status())
        for name, status in found.items():
            if isinstance(status, CkptSyncError):
                continue
            if not status.paused:
                self.held.discard(name)
            if name in self.dirty and (not status.paused or self._outlives(name, status)):
                del self.dirty[name]
        return found

    def check_welcome(self, delivery: Delivery) -> None:
        """Before any is paused: OutOfOrder or SchemaMismatch, the same on every rank, if one of them holds a newer
        version, or needs other tensors. Of a mix the label counts for nothing.
        """
        found = self.look()
        check_newer(delivery, {name: said for name, said in found.items() if name not in self.dirty})
        self._foreign = {name for name, said in found.items() if _holds(said, delivery.version)}
        # Modules of this process are looked at by the transports themselves, on each rank.
        away = [engine for engine in self.all if not isinstance(engine, LocalEngine)]
        for answer in self._ask(away, lambda engine: check_fits(engine, delivery)).values():
            if isinstance(answer, SchemaMismatch):
                raise answer

    def adopt_paused(self) -> None:
        """Engines found paused were left so by a trainer that died in mid-send: whole only after the next full one."""
        for name, status in self.look().items():
            if isinstance(status, EngineStatus) and status.paused:
                self.held.add(name)
                self.dirty[name] = ENDLESS

    def lacking(self, version: VersionId) -> list[SyncEngine]:
        """Those that do not say that they hold it."""
        found = self.look()
        return [each for each in self.all if each.name in self._foreign or not _holds(found[each.name], version)]

    def soil(self, names: Iterable[str], version: VersionId) -> None:
        """A send of `version` to these broke off."""
        self.dirty |= dict.fromkeys(names, version)

    def take(self, engines: Sequence[SyncEngine]) -> dict[str, str]:
        """Pause them; engine -> boot id. EngineUnavailable for one that does not answer, or that somebody else has
        paused: a watcher in the middle of a load."""
        before = self._must(engines, lambda engine: engine.status())
        taken = [name for name, status in before.items() if status.paused and name not in self.held]
        if taken:
            raise EngineUnavailable(f"{', '.join(taken)}: paused by somebody else, who may be loading it")
        # Before the call: a pause whose answer was lost may have paused it all the same.
        self.held.update(before)
        try:
            self._must(engines, lambda engine: engine.pause())
        except CkptSyncError:
            self.doubt()  # it may wait for long requests, and then is to be resumed
            raise
        return {name: status.boot_id for name, status in before.items()}

    def confirm(self, engines: Sequence[SyncEngine], label: str, boots: Mapping[str, str]) -> None:
        """ProofFailed unless each reports the label, and is the process that was paused."""
        for name, status in self._must(engines, lambda engine: engine.status()).items():
            if status.label != label:
                raise ProofFailed(f"{name} reports {status.label or 'no version'!r} after it was sent {label}")
            if boots and status.boot_id != boots[name]:
                raise ProofFailed(f"{name} was restarted while {label} was sent")
            self.dirty.pop(name, None)
            self._foreign.discard(name)

    def resume(self) -> list[str]:
        """Let every engine compute that we paused and that holds no mix; those that would not are named."""
        clean = [engine for engine in self.all if engine.name in self.held - self.dirty.keys() - self.silent.keys()]
        answers = self._ask(clean, _resume)
        failed = {name: answer for name, answer in answers.items() if isinstance(answer, CkptSyncError)}
        self.held -= answers.keys() - failed.keys()
        for name, error in failed.items():
            more = {"event": "not-resumed", "engine": name}
            log.error("%s is whole and cannot be resumed: %s", name, error, extra=more)
        return sorted(failed)

    def hand_over(self, engines: Iterable[SyncEngine], heard: Iterable[str]) -> None:
        """From now on watchers load them, and resume them. `heard`, by any rank: not silent any more."""
        self.held -= {engine.name for engine in engines}
        for name in set().union(*self._ranks.gather(set(heard))):
            self.silent.pop(name, None)

    def release(self, touched: set[str]) -> None:
        """Not collective: a rank was lost, or the process has to end. Whoever was not touched computes on."""
        for engine in self.all:
            if engine.name in self.held - self.dirty.keys() - self.silent.keys() - touched and self._asks(engine):
                _answer(engine, _resume)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _outlives(self, name: str, status: EngineStatus) -> bool:
        """Whether its label came after the data that were sent to it last."""
        return name not in self._foreign and (status.version or NONE) >= self.dirty[name]

    def _must(self, engines: Sequence[SyncEngine], question: Callable[[SyncEngine], Any]) -> Answers:
        answers = self._ask(engines, question)
        for answer in answers.values():
            if isinstance(answer, CkptSyncError):
                raise answer
        return answers

    def _ask(self, engines: Sequence[SyncEngine], question: Callable[[SyncEngine], Any]) -> Answers:
        """All at a time: a pause may wait for requests under way. Silent ones say what they said before."""
        asked = [engine for engine in engines if engine.name not in self.silent]
        every = self._ranks.gather(self._answers([each for each in asked if self._asks(each)], question))
        found = {each.name: _common([said[each.name] for said in every if each.name in said]) for each in asked}
        self._doubted -= found.keys()
        self._note({name: said for name, said in found.items() if isinstance(said, EngineError) and said.silent})
        return {engine.name: found.get(engine.name, self.silent.get(engine.name)) for engine in engines}

    def _answers(self, engines: Sequence[SyncEngine], question: Callable[[SyncEngine], Any]) -> Answers:
        """Of this rank. In side threads, since a short question may be given up before its request ends."""
        asked = {engine.name: once("ckptsync-ask", partial(_answer, engine, question)) for engine in engines}
        wait(asked.values(), SHORT_SECONDS)
        for name in [name for name, answer in asked.items() if not answer.done()]:
            more = {"event": "engine-slow", "engine": name}
            log.warning("%s has not answered for %g s", name, SHORT_SECONDS, extra=more)
        wait([answer for name, answer in asked.items() if name not in self._doubted])
        return {name: answer.result() if answer.done() else _no_answer(name) for name, answer in asked.items()}

    def _note(self, silent: Mapping[str, EngineError]) -> None:
        for name, error in silent.items() if self._ranks.is_writer else ():
            log.warning("%s does not answer: %s", name, error, extra={"event": "engine-silent", "engine": name})
        self.silent |= silent

    def _asks(self, engine: SyncEngine) -> bool:
        return self._ranks.is_writer or isinstance(engine, LocalEngine)


def _address(engine: SyncEngine) -> str:
    """Empty for one that does not even say where it is, such as an actor that is being started again."""
    try:
        return engine.http.url if isinstance(engine, HttpEngine) else url_of(engine)
    except EngineError:
        return ""


def _no_answer(name: str) -> EngineUnavailable:
    error = EngineUnavailable(f"{name} did not answer before, and not within {SHORT_SECONDS:g} s now")
    error.silent = name
    return error


def _answer(engine: SyncEngine, question: Callable[[SyncEngine], Any]) -> Any:
    try:
        return question(engine)
    except CkptSyncError as error:
        return error
    except Exception as error:  # noqa: BLE001 - an adapter's own bug counts as the worst that an adapter may say
        return EngineDirty(f"{engine.name}: {type(error).__name__}: {error}")


def _common(answers: list[Any]) -> Any:
    """One for all ranks: the first error; of different labels none."""
    for answer in answers:
        if isinstance(answer, CkptSyncError):
            return answer
    first = answers[0]
    if isinstance(first, EngineStatus) and len(answers) > 1:
        same = len({status.label for status in answers}) == 1
        boots = "/".join(status.boot_id for status in answers)
        return EngineStatus(
            label=first.label if same else "", boot_id=boots, paused=any(status.paused for status in answers)
        )
    return first


def _holds(status: Any, version: VersionId) -> bool:
    return isinstance(status, EngineStatus) and status.label == version.label


def _resume(engine: SyncEngine) -> None:
    tries = Retrying(
        stop=stop_after_attempt(RESUME_TRIES),
        wait=wait_exponential(multiplier=0.1, max=2.0),
        reraise=True,
        retry=retry_if_exception(lambda error: not getattr(error, "silent", "")),
    )
    tries(engine.resume)
