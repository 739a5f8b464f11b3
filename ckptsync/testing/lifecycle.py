"""Random lives of a channel on a store: attempts that publish, resume and die, rollbacks, holds, collections, litter.

    class Life(Lifecycle):
        def fresh_store(self):
            return open_store(f"memory://{uuid4()}")

    TestLife = Life.TestCase            # a unittest.TestCase, which pytest runs too

What happens next is drawn by hypothesis, which shrinks a life that breaks a law to its shortest form. Everything that
acts is the product's own code, on weights of a few bytes; `watchers.testing` adds readers with engines. The invariants
are the laws of the project, each named by its number in `docs/testing.md`.

Rules may be added by subclassing. Needs `ckptsync[testing,torch]`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from .. import holds
from ..channel import Channel
from ..collect import Collector
from ..digest import digest
from ..errors import AlreadyExists, Corrupt, Fenced, VersionExists, VersionGone
from ..layout import EPOCHS, MANIFESTS, epoch_of, manifest_path, version_of
from ..manifest import MAX_BYTES, TensorSpec
from ..retention import Retention, needs_of
from ..rollback import roll_back
from ..shards.tensors import spec_of
from ..store.base import Store, put_bytes, read_bytes
from ..sweep import sweep_debris
from ..verify import verify_version
from ..version import VersionId
from .extra import needed
from .hooks import HookedStore
from .memory import MemoryStore
from .mortal import Killed, Life, Timeless, Trainer, Weights, content_of, first_weights

with needed("hypothesis"):
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

DEATHS = st.none() | st.integers(0, 25)
"""After how many changes to the store whoever acts is killed; None: it lives."""


class Lifecycle(RuleBasedStateMachine):
    """See the module. `fresh_store` is asked once for each life."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Store = Timeless(self.fresh_store())
        self.steps = 0
        self.trainer: Trainer | None = None
        """The newest attempt, if it lives."""

        self.replaced: list[Trainer] = []
        """Attempts that do not know that they were replaced."""

        self.newest: VersionId | None = None
        self.given: dict[VersionId, str] = {}
        """Version -> content digest of the weights that it was made of."""

        self.held: dict[str, VersionId] = {}
        """What somebody holds, having been told that it stays."""

        self._weights: dict[VersionId, Weights] = {}
        self._records: dict[str, str] = {}
        self._litter: set[str] = set()
        self._read: set[VersionId] = set()

    def fresh_store(self) -> Store:
        """A store that holds nothing."""
        return MemoryStore()

    def attempt(self, base: VersionId | None, weights: Weights, deltas: bool) -> Trainer:
        """Not started yet. One with several ranks looks the same to a life."""
        return Trainer(self.store, base, weights, deltas)

    @staticmethod
    def schema() -> dict[str, TensorSpec]:
        """Of every version that is published here."""
        return {name: spec_of(name, tensor) for name, tensor in first_weights().items()}

    @property
    def channel(self) -> Channel:
        """As somebody sees it who comes now."""
        return Channel.open(self.store)

    def committed(self) -> list[VersionId]:
        return [version for version in self.channel.committed() if manifest_path(version) not in self._litter]

    def some(self, data: st.DataObject) -> VersionId:
        """Any version that is there."""
        return data.draw(st.sampled_from(self.committed()))

    # -- trainers --------------------------------------------------------------------------------------------------

    @initialize(deltas=st.booleans())
    def begin(self, deltas: bool) -> None:
        self._start(None, deltas, None)

    @rule(data=st.data(), deltas=st.booleans(), from_latest=st.booleans(), dies=DEATHS)
    def resume(self, data: st.DataObject, deltas: bool, from_latest: bool, dies: int | None) -> None:
        """A new attempt, while the old one may still run."""
        base = None if from_latest or self.newest is None else self.some(data)
        self._start(base, deltas, dies)

    def _start(self, base: VersionId | None, deltas: bool, dies: int | None) -> None:
        start = self._weights.get(base or self.newest or VersionId(0, 0)) or first_weights()
        trainer = self.attempt(base, {name: tensor.clone() for name, tensor in start.items()}, deltas)
        before = max(self.channel.claims(), default=0)
        lives = self._lives(trainer.life, dies, trainer.start)
        if max(self.channel.claims(), default=0) == before:
            return  # nobody has noticed
        if self.trainer is not None:
            self.replaced.append(self.trainer)
        if base is not None:
            self.newest = base
        self.trainer = trainer if lives else None

    @precondition(lambda self: self.trainer)
    @rule(count=st.integers(1, 3), dies=DEATHS)
    def publish(self, count: int, dies: int | None) -> None:
        """Law 6: whatever readers do, nothing but its own death keeps the newest attempt from publishing."""
        for _ in range(count):
            if self.trainer is None:
                return
            self.steps += 1
            self.trainer.train(self.steps)
            self.publishes(self.trainer, dies, self.trainer.weights)

    def publishes(self, trainer: Trainer, dies: int | None, weights: Weights) -> None:
        before, content = set(self.committed()), content_of(weights)
        lives = self._lives(trainer.life, dies, lambda: trainer.publisher.publish(weights, step=self.steps))
        new = set(self.committed()) - before
        assert len(new) <= 1, f"one publish made {new}"
        assert new or not lives, "it was published, and is not there"
        for version in new:
            assert version.epoch == trainer.publisher.epoch, f"epoch {trainer.publisher.epoch} published {version}"
            self.is_published(version, content, weights)
        if not lives:
            self.trainer = None

    def is_published(self, version: VersionId, content: str, weights: Weights) -> None:
        """It is the newest now. `weights`: what an attempt that resumes from it goes on with."""
        self.given[version], self.newest = content, version
        self._weights[version] = {name: tensor.clone() for name, tensor in weights.items()}

    @precondition(lambda self: self.replaced)
    @rule(data=st.data())
    def publish_though_replaced(self, data: st.DataObject) -> None:
        """Law 2: a newer epoch fences every older one."""
        trainer = data.draw(st.sampled_from(self.replaced))
        trainer.train(self.steps)
        try:
            done = trainer.publisher.publish(trainer.weights)
        except Fenced:
            return
        raise AssertionError(f"{done.version} was published by an attempt that had been replaced")

    @precondition(lambda self: self.trainer and self.newest and self.newest.epoch == self.trainer.publisher.epoch)
    @rule(other=st.booleans())
    def publish_again(self, other: bool) -> None:
        """Law 2: the same number with the same content is a retry, with other content an error."""
        trainer, newest = self.trainer, self.newest
        assert trainer is not None
        assert newest is not None
        if self.given[newest] != content_of(self._weights[newest]):
            return  # an adapter
        weights = {name: tensor + (1 if other else 0) for name, tensor in self._weights[newest].items()}
        try:
            done = trainer.publisher.publish(weights, number=newest.number)
        except (VersionExists, AlreadyExists):
            assert other, f"a retry of {newest} was refused"
            return
        assert not other, f"{done.version} was published over with other content"
        assert done.version == newest

    @precondition(lambda self: self.newest)
    @rule(data=st.data(), dies=DEATHS)
    def go_back(self, data: st.DataObject, dies: int | None) -> None:
        target = self.some(data)
        if target == self.newest:
            return
        before, claimed, life = set(self.committed()), max(self.channel.claims(), default=0), Life()
        channel = Channel.open(HookedStore(self.store, life))
        with suppress(VersionGone):  # noted by a collector that died
            self._lives(life, dies, lambda: roll_back(channel, channel.manifest(target)))
        for version in set(self.committed()) - before:
            self.is_published(version, self.given[target], self._weights[target])
        if max(self.channel.claims(), default=0) > claimed and self.trainer is not None:
            self.replaced.append(self.trainer)
            self.trainer = None

    @precondition(lambda self: self.trainer)
    @rule()
    def sweep(self) -> None:
        """Clear up after attempts that died."""
        assert self.trainer is not None
        publisher = self.trainer.publisher
        claim = self.channel.claims()[publisher.epoch]
        assert claim is not None
        sweep_debris(self.channel, claim, grace=-1e9)

    # -- readers ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.newest)
    @rule(data=st.data(), how=st.sampled_from(["pin", "lease", "receipt"]))
    def hold(self, data: st.DataObject, how: str) -> None:
        version = self.some(data)
        with suppress(VersionGone):
            if how == "pin":
                holds.pin(self.channel, version, "kept")
                self.held[f"pin {version}"] = version
                return
            self.held.pop(how, None)  # a reader has one of each
            if how == "lease":
                self.channel.lease("reader", version, 1e6)
            else:
                self.channel.write_receipt("reader", {"label": version.label})
            holds.check_not_collected(self.channel, version)
            self.held[how] = version

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        how = data.draw(st.sampled_from(sorted(self.held)))
        version = self.held.pop(how)
        if how == "lease":
            self.channel.release("reader")
        elif how == "receipt":
            self.channel.write_receipt("reader", {"label": ""})
        else:
            holds.unpin(self.channel, version)

    @precondition(lambda self: self.newest)
    @rule(data=st.data())
    def read_every_byte(self, data: st.DataObject) -> None:
        with suppress(VersionGone):  # noted by a collector that died
            self._is_whole(self.some(data))

    def _is_whole(self, version: VersionId) -> None:
        problems = verify_version(self.channel, version).problems
        assert not problems, f"law 1: {version} is not whole: {problems}"

    # -- retention, and others -------------------------------------------------------------------------------------

    @rule(
        last=st.integers(2, 3), every=st.none() | st.integers(2, 5), branches=st.booleans(),
        grace=st.sampled_from([0.0, 3600.0]), dies=DEATHS,
    )  # fmt: skip
    def collect(self, last: int, every: int | None, branches: bool, grace: float, dies: int | None) -> None:
        policy = Retention(keep_last=last, keep_every=every, keep_branches=branches, grace=grace)
        life = Life()
        collector = Collector(Channel.open(HookedStore(self.store, life)), policy)
        if not self._lives(life, dies, collector.collect):
            self.store.delete("collector/claim.json")  # as if its time had run out

    @rule(
        name=st.sampled_from(
            [
                "manifests/v00000007.tmp",
                "manifests/.nfs0001",
                "manifests/e1-v7 (copy).json",
                "data/lost+found/x",
                "v7/w",
            ]
        ),
        content=st.binary(max_size=20),
    )
    def litter(self, name: str, content: bytes) -> None:
        """Laws 1 and 10: files that are no part of a channel, or not any more."""
        put_bytes(self.store, name, content)

    @precondition(lambda self: self.newest and not self.trainer and not self._litter)
    @rule(part=st.floats(0, 1, exclude_max=True))
    def tear(self, part: float) -> None:
        """An attempt dies in the middle of its manifest, on a mount that has no better way to create a file."""
        assert self.newest is not None
        data = read_bytes(self.store, manifest_path(self.newest), MAX_BYTES)
        path = manifest_path(VersionId(self.newest.epoch, self.newest.number + 1000))
        self._litter.add(path)
        put_bytes(self.store, path, data[: int(part * len(data))])

    # -- the laws --------------------------------------------------------------------------------------------------

    @invariant()
    def law_1_a_version_has_all_its_files(self) -> None:
        there = {entry.path: entry.size for entry in self.store.list("data")}
        for version in self.committed():
            manifest = self.channel.manifest(version)
            for name, file in manifest.stored_files():
                path = f"{manifest.folder}/{name}"
                assert there.get(path) == file.size, f"law 1: {version} is committed, and {path} is not whole"
            if version not in self._read:
                self._is_whole(version)
                self._read.add(version)

    @invariant()
    def law_2_a_committed_record_is_never_written_again(self) -> None:
        for entry in [*self.store.list(MANIFESTS), *self.store.list(EPOCHS)]:
            if version_of(entry.path) is not None or epoch_of(entry.path) is not None:
                found = digest(read_bytes(self.store, entry.path, MAX_BYTES))
                assert self._records.setdefault(entry.path, found) == found, f"law 2: {entry.path} was written again"

    @invariant()
    def law_4_a_version_has_the_weights_that_it_was_made_of(self) -> None:
        for version in self.committed():
            found = self.channel.manifest(version).content_digest
            assert found == self.given[version], f"law 4: {version} has other weights"

    @invariant()
    def law_8_the_newest_is_by_epoch_and_number(self) -> None:
        found = self.channel.latest().id if self.newest else None
        assert found == self.newest, f"law 8: {found} is the newest, and it should be {self.newest}"
        assert self.channel.poll() == self.newest, "law 1: the head is only a hint"

    @invariant()
    def law_9_what_is_held_or_needed_is_there(self) -> None:
        committed = set(self.committed())
        for who, version in self.held.items():
            assert version in committed, f"law 9: {version} is gone, though there is a {who}"
        for version in committed:
            missing = set(needs_of(self.channel.manifest(version))) - committed
            assert not missing, f"law 9: {version} is made from {missing}, which is gone"

    @invariant()
    def law_10_what_is_torn_is_refused_by_name(self) -> None:
        for path in self._litter:
            version = next(each for each in self.channel.committed() if manifest_path(each) == path)
            with suppress(Corrupt):
                raise AssertionError(f"law 10: {self.channel.manifest(version).id} was read from a torn file")

    def _lives(self, life: Life, dies: int | None, act: Callable[[], object]) -> bool:
        """Whether it came to its end before it was killed."""
        life.left = dies
        try:
            act()
        except Killed:
            return False
        life.left = None
        return True


def lifecycle(fresh_store: Callable[[], Store]) -> type[Lifecycle]:
    """A Lifecycle on such stores. `fresh_store` makes an empty one each time."""
    return type("Lifecycle", (Lifecycle,), {"fresh_store": staticmethod(fresh_store)})
