"""Random lives of a channel with readers in them: watchers beside engines that fail, lie and restart.

    class Life(WatchedLifecycle):
        def fresh_store(self):
            return open_store(f"memory://{uuid4()}")

    TestLife = Life.TestCase

See `ckptsync.testing.lifecycle`. Needs `ckptsync[testing,torch]`.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile

from ckptsync.delta import whole
from ckptsync.errors import CkptSyncError, EngineDirty, EngineRefused, EngineUnavailable, ProofFailed
from ckptsync.manifest import TensorSpec
from ckptsync.store.base import Store, read_bytes
from ckptsync.testing.engines import Failing
from ckptsync.testing.extra import needed
from ckptsync.testing.hooks import HookedStore
from ckptsync.testing.lifecycle import Lifecycle
from ckptsync.version import VersionId, parse_label

from .health import Health
from .watcher import Watcher

with needed("hypothesis"):
    from hypothesis import strategies as st
    from hypothesis.stateful import invariant, rule

READERS = st.integers(0, 1)


class Reader:
    """One engine, and whoever watches for it; a watcher that is gone is replaced by another on the same stage."""

    def __init__(self, store: Store, name: str, folder: str, schema: dict[str, TensorSpec]) -> None:
        self.engine = Failing(schema)
        self.touched: list[str] = []
        """What was asked of the store while the engine was paused."""

        self._store = HookedStore(store, self._look)
        self._name, self._folder = name, folder
        self.watcher = self._watcher()

    def replace(self) -> None:
        """The watcher is killed, and another one started."""
        self.watcher.stage.close()
        self.watcher = self._watcher()

    def _watcher(self) -> Watcher:
        self._state = "idle"
        return Watcher(
            self._store, self.engine, stage=self._folder, reader=self._name, events=False, patience=0.0,
            on_change=self._changed,
        )  # fmt: skip

    def _changed(self, health: Health) -> None:
        self._state = health.state

    def _look(self, operation: str, path: str) -> None:
        if self.engine.paused and self._state in {"paused", "loading"} and not self._was_let_on():
            self.touched.append(f"{operation} {path}")

    def _was_let_on(self) -> bool:
        """Also if the engine did not hear of it: the load is over then, and a receipt says that it stays paused."""
        turns = [call for call in self.engine.calls if call.startswith(("pause", "resume"))]
        return bool(turns) and turns[-1].startswith("resume")


class WatchedLifecycle(Lifecycle):
    """A Lifecycle with two readers."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp(prefix="ckptsync-life-")
        self.readers = [Reader(self.store, f"watcher-{n}", f"{self._folder}/{n}", self.schema()) for n in range(2)]
        self._bytes: dict[VersionId, str] = {}

    @rule(which=READERS)
    def reads(self, which: int) -> None:
        self.readers[which].watcher.step()

    @rule(
        which=READERS,
        step=st.sampled_from(["status", "pause", "start", "update", "finish", "confirm", "resume"]),
        error=st.sampled_from([EngineDirty, EngineRefused, EngineUnavailable, ProofFailed]),
        times=st.integers(1, 3),
    )
    def reads_beside_an_engine_that_fails(self, which: int, step: str, error: type[CkptSyncError], times: int) -> None:
        reader = self.readers[which]
        reader.engine.fail(step, error, times=times)
        reader.watcher.step()

    @rule(which=READERS)
    def engine_restarts(self, which: int) -> None:
        self.readers[which].engine.restart()

    @rule(which=READERS)
    def watcher_is_replaced(self, which: int) -> None:
        self.readers[which].replace()

    @invariant()
    def law_3_the_store_is_not_touched_while_an_engine_is_paused(self) -> None:
        for reader in self.readers:
            assert not reader.touched, f"law 3: {reader.touched} while {reader.watcher.reader}'s engine was paused"

    @invariant()
    def law_4_an_engine_holds_what_its_label_says(self) -> None:
        self._learn()
        for reader in self.readers:
            engine = reader.engine
            if engine.paused:
                continue
            version = parse_label(engine.label)
            expected = self._bytes[version] if version is not None else "base"
            assert engine.weights == expected, f"laws 4 and 5: {reader.watcher.reader} serves {engine.weights} "\
                f"as {engine.label or 'its base weights'}"  # fmt: skip

    @invariant()
    def law_5_an_engine_is_ready_on_a_whole_version_or_says_why_not(self) -> None:
        for reader in self.readers:
            health, name = reader.watcher.health, reader.watcher.reader
            assert not (health.ready and reader.engine.paused), f"law 5: {name} is ready, and its engine paused"
            assert health.ready or health.reason, f"law 5: {name} is not ready, and says no reason"

    @invariant()
    def law_9_what_a_reader_serves_is_there(self) -> None:
        committed = self.committed()
        for reader in self.readers:
            version = parse_label(reader.watcher.health.version)
            assert version is None or version in committed, (
                f"law 9: {version} is gone, and {reader.watcher.reader} serves it"
            )

    def _learn(self) -> None:
        """What an engine that holds a version reads from its folder, once for each."""
        for version in self.committed():
            if version not in self._bytes:
                state = hashlib.sha256()
                with whole(self.channel, self.channel.manifest(version)) as (store, full):
                    for name in sorted(name for name, _ in full.files() if name.endswith(".safetensors")):
                        state.update(read_bytes(store, f"{full.folder}/{name}", 1 << 20))
                self._bytes[version] = state.hexdigest()

    def teardown(self) -> None:
        super().teardown()
        for reader in self.readers:
            reader.watcher.close()
        shutil.rmtree(self._folder)
