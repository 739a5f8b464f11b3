"""The receiving end of the gloo transport, for engines whose modules are in this process.

    join -> start -> bucket, bucket, ... -> finish

`start` checks everything that can be told from names, and refuses there; from the first bucket on the engine has no
label, and from then on it may not compute before a version is complete in it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ckptsync.digest import digest
from ckptsync.engine import StagedVersion
from ckptsync.errors import CkptSyncError, EngineDirty, EngineError, EngineRefused, EngineUnavailable, ProofFailed
from ckptsync.shards.tensors import TORCH_DTYPES, tensor_bytes
from ckptsync.transports.applied import Applied
from ckptsync.transports.base import LocalEngine
from ckptsync.transports.pair import Pair
from ckptsync.transports.targets import Targets
from ckptsync.transports.wire import Finish, Finished, Join, Names, Start, Started, content_of
from ckptsync.version import VersionId


@dataclass(slots=True)
class _Session:
    start: Start
    targets: Targets
    touched: bool = False


class Receiver:
    """One engine's. One call at a time; a second one at the same time is refused."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._applied = Applied()
        self._pair: Pair | None = None
        self._session: _Session | None = None
        self._held: _Session | None = None
        """How the version that is held came, to read it back."""
        self._busy = threading.Lock()

    def join(self, join: Join) -> None:
        """Enter the sender's group. EngineRefused if it is not to be found."""
        with self._alone(EngineUnavailable):
            self._pair = None
            try:
                self._pair = Pair.join(join.host, join.port, join.rank, join.size, join.seconds)
            except RuntimeError as error:
                raise EngineRefused(f"cannot join the sender at {join.host}:{join.port}: {error}") from error

    def start(self, start: Start) -> Started:
        """EngineRefused unless paused; SchemaMismatch, OutOfOrder, VersionExists. Nothing is touched yet."""
        with self._alone(EngineUnavailable):
            if not self._engine.status().paused:
                raise EngineRefused(f"{self._engine.name}: is not paused")
            held = self._applied.check(start.version, start.digest, allow_older=start.allow_older)
            if held and self._engine.status().label == start.version.label:
                return Started(held)
            targets = Targets(
                self._engine.modules, start.specs, start.ties, kind=start.kind, name=self._engine.name
            )  # fmt: skip
            self._session = _Session(start, targets, touched=self._session is not None and self._session.touched)
            return Started("")

    def bucket(self, names: Names) -> None:
        """Receive these tensors and copy them in. EngineDirty if anything goes wrong: a part may be in."""
        with self._alone():
            session, pair = self._open()
            session.touched = True
            self._engine.begin()
            self._applied.begin(session.start.version)
            self._held = None
            try:
                session.targets.copy(names.track, self._received(session.start, names, pair))
            except CkptSyncError:
                pair.abort()  # engines of the same send wait for this one too
                raise
            except Exception as error:
                pair.abort()
                raise EngineDirty(
                    f"{self._engine.name}: a bucket of {session.start.version} broke off: {error}"
                ) from error

    def finish(self, finish: Finish) -> Finished:
        """Read everything back from the live tensors, and only then take the label."""
        with self._alone():
            session, _ = self._open()
            session.targets.check_complete()
            found = _content(session)
            if found != finish.digest:
                raise ProofFailed(f"{self._engine.name}: holds {found} after {finish.label}, sent was {finish.digest}")
            if finish.label != session.start.version.label:
                raise ProofFailed(f"{self._engine.name}: was sent {session.start.version}, and told {finish.label}")
            self._applied.record(session.start.version, found)
            self._engine.hold(finish.label)
            self._session, self._held, self._pair = None, session, None
            return Finished(finish.label, found)

    def read_back(self) -> Finished | None:
        """What is held by a send, digested anew; None if the engine was loaded in another way, or may hold a mix."""
        if self._held is None:
            return None
        return Finished(self._held.start.version.label, _content(self._held))

    def check_whole(self) -> None:
        """EngineRefused while a send has left a mix, or weights are being changed: it must not compute."""
        if self._busy.locked():
            raise EngineRefused(f"{self._engine.name}: is being loaded at this moment")
        if self._session is not None and self._session.touched:
            raise EngineRefused(
                f"{self._engine.name}: {self._session.start.version} is half received: load a version first"
            )

    @contextmanager
    def loading(self, version: VersionId, content: str) -> Iterator[None]:
        """Around a load from files, after which the engine holds `version`, whatever was sent before."""
        with self._alone():
            try:
                yield
            except EngineDirty:
                self._applied.begin(version)
                self._held = None
                raise
            self._session, self._held = None, None
            self._applied.record(version, content)

    # -- inside --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self, kind: type[EngineError] = EngineRefused) -> Iterator[None]:
        """`kind`: what it is for who comes second; before a send has begun it is a matter of waiting."""
        if not self._busy.acquire(blocking=False):
            raise kind(f"{self._engine.name}: is being loaded by somebody else at this moment")
        try:
            yield
        finally:
            self._busy.release()

    def _open(self) -> tuple[_Session, Pair]:
        if self._session is None or self._pair is None:
            raise EngineRefused(f"{self._engine.name}: no send is under way: start it first")
        return self._session, self._pair

    def _received(self, start: Start, names: Names, pair: Pair) -> Iterator[tuple[str, torch.Tensor]]:
        specs = {spec.name: spec for spec in start.specs.get(names.track, [])}
        for name in names.names:
            tensor = torch.empty(specs[name].shape, dtype=TORCH_DTYPES[specs[name].dtype])
            pair.broadcast(tensor)
            yield name, tensor


class Received:
    """The adapter of an engine that also receives, for whoever loads it from files step by step."""

    def __init__(self, engine: Any, receiver: Receiver) -> None:
        self._engine, self._receiver = engine, receiver

    def update(self, version: StagedVersion) -> None:
        with self._receiver.loading(version.manifest.id, version.manifest.content_digest):
            self._engine.update(version)

    def resume(self) -> None:
        """EngineRefused while a send has left a mix."""
        self._receiver.check_whole()
        self._engine.resume()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _content(session: _Session) -> str:
    start = session.start
    digests = {
        track: {name: digest(tensor_bytes(tensor)) for name, tensor in session.targets.live(track)}
        for track in start.specs
    }
    return content_of(start.specs, start.ties, digests)
