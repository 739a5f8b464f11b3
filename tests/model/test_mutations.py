"""Protocol bugs, planted one at a time: each must break a law in some schedule, or the model could not find it either.

A mutation is a patch of the product's code, named by what it leaves out. `docs/conformance.md` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest

from ckptsync import channel, collect, committing, epochs, holds, ledger, sweep
from ckptsync.channel import Channel
from ckptsync.collect import Collector
from ckptsync.epochs import Epoch
from ckptsync.errors import NotFound
from ckptsync.head import Head
from ckptsync.layout import COLLECTED, HEAD, claim_path, manifest_path
from ckptsync.manifest import Manifest
from ckptsync.store.base import Store, Writer, put_bytes, read_bytes
from ckptsync.store.clock import StoreClock
from ckptsync.testing.explore import Violation, explore
from ckptsync.testing.memory import MemoryStore
from ckptsync.version import VersionId

from . import test_model as model
from .worlds import World, published


class Early:
    """A publisher's view that holds its data back until the manifest is there."""

    def __init__(self, store: Store) -> None:
        self._store, self._late = store, list[tuple[str, bytes]]()
        self.url, self.list, self.open, self.delete = store.url, store.list, store.open, store.delete

    def write(self, path: str) -> Writer:
        return _Late(self._late, path) if path.startswith("data/e") else self._store.write(path)

    def create(self, path: str, data: bytes) -> None:
        self._store.create(path, data)
        if path.startswith("manifests/"):
            for late in self._late:
                put_bytes(self._store, *late)


class _Late:
    def __init__(self, late: list[tuple[str, bytes]], path: str) -> None:
        self._late, self._path, self._data = late, path, bytearray()

    def write(self, data: Any) -> None:
        self._data += data

    def commit(self) -> None:
        self._late.append((self._path, bytes(self._data)))

    def abort(self) -> None: ...


class Generous(MemoryStore):
    """A mount on which both of two creators are told that they won; the first one's bytes stay (docs/design/0001)."""

    def create(self, path: str, data: bytes) -> None:
        self.files.setdefault(path, data)


def put_instead_of_create(store: Store, path: str, data: bytes) -> None:
    put_bytes(store, path, data)


def a_trainer_and_its_copy() -> World:
    """Two processes that believe in the same epoch, on a mount that lets both win."""
    world = World(published(1), Generous)
    world.let("one", world.commit(model.V2, 8))
    return world.let("two", world.commit(model.V2, 9))


def manifest_before_data_under_a_reader() -> World:
    world = World(published(1))
    return world.let("trainer", world.publish(2, through=Early)).let("reader", world.follow(2))


def a_trainer_that_goes_on_after_it_was_replaced() -> World:
    world = World(published(1))
    return world.let("old", world.publish(2, 3)).let("new", world.publish(4))


# What the mutants do instead


def no_read_back(store: Store, mine: Manifest) -> Manifest:
    return mine


def claim_by_overwriting(store: Store, mine: Epoch, data: bytes) -> bool:
    put_bytes(store, claim_path(mine.number), data)
    return True


def commit_by_overwriting(store: Store, manifest: Manifest) -> Manifest:
    put_bytes(store, manifest_path(manifest.id), manifest.encoded)
    return manifest


def newest_by_the_hint(self: Channel) -> VersionId | None:
    try:
        head = msgspec.json.decode(read_bytes(self.store, HEAD, 1 << 16), type=Head)
    except NotFound:
        return None
    return VersionId(head.epoch, head.number)


def live_by_number(versions: Iterable[VersionId], claims: object) -> list[VersionId]:
    return sorted(versions, key=lambda version: (version.number, version.epoch))


def held_by_pins_alone(store: Store, clock: StoreClock) -> dict[VersionId, str]:
    return dict.fromkeys(holds.pins(store), "pinned")


def looks_once(look: Callable[..., Any]) -> Callable[..., Any]:
    """What the first look of a collector found is what every later one finds."""
    found: dict[object, Any] = {}

    def again(of: object, *rest: object) -> Any:
        if of not in found:
            found[of] = look(of, *rest)
        return found[of]

    return again


def data_with_the_note(store: Store, path: str, data: bytes) -> None:
    """The collector's note, and the data are gone before the manifest is."""
    put_bytes(store, path, data)
    if path.startswith(f"{COLLECTED}/"):
        for entry in store.list(msgspec.json.decode(data, type=collect.Note).folder):
            store.delete(entry.path)


class Mutation(NamedTuple):
    leaves_out: str
    then: str
    """What the law says that is broken."""

    world: Callable[[], World]
    patches: tuple[tuple[object, str, Any], ...] = ()


def none(*_: object) -> None: ...


def yes(*_: object) -> bool:
    return True


MUTATIONS = [
    Mutation("data before the manifest", "is committed and .* is not there", manifest_before_data_under_a_reader),
    Mutation(
        "reading the nonce back",
        "was published as .* and is",
        a_trainer_and_its_copy,
        ((committing, "_settle", no_read_back),),
    ),
    Mutation(
        "the fence",
        "after a newer epoch had been claimed",
        a_trainer_that_goes_on_after_it_was_replaced,
        ((epochs, "check_fence", none), (ledger, "check_fence", none)),
    ),
    Mutation(
        "create-if-absent of the epoch",
        "was written again",
        model.two_trainers_on_an_empty_root,
        ((epochs, "_create_claim", claim_by_overwriting),),
    ),
    Mutation(
        "create-if-absent of the manifest",
        "was written again",
        a_trainer_and_its_copy,
        ((channel, "create_manifest", commit_by_overwriting),),
    ),
    Mutation(
        "the listing as the truth",
        "a reader that comes now gets",
        a_trainer_that_goes_on_after_it_was_replaced,
        ((Channel, "poll", newest_by_the_hint),),
    ),
    Mutation(
        "epochs in the order of versions",
        "is the newest, though",
        model.a_resume_from_an_earlier_version_under_the_old_trainer,
        ((epochs, "live", live_by_number),),
    ),
    Mutation(
        "leases",
        "is held",
        model.a_collector_beside_a_pin_and_a_lease,
        ((collect, "held", held_by_pins_alone),),
    ),
    Mutation(
        "the second look for pins and leases",
        "is held",
        model.a_collector_beside_a_pin_and_a_lease,
        ((collect, "held", looks_once),),
    ),
    Mutation(
        "the second look for manifests",
        "is committed and .* is not there",
        model.a_rollback_beside_a_collector,
        ((Collector, "_survey", looks_once),),
    ),
    Mutation(
        "the pin's look for a note",
        "is held",
        model.a_collector_beside_a_pin_and_a_lease,
        ((holds, "check_not_collected", none),),
    ),
    Mutation(
        "the manifest before the data, in a collection",
        "is committed and .* is not there",
        model.two_collectors_and_a_follower,
        ((collect, "put_bytes", data_with_the_note),),
    ),
    Mutation(
        "that a sweep keeps off newer epochs",
        "is committed and .* is not there",
        model.a_sweep_under_a_frozen_trainer,
        ((sweep, "_is_older", yes),),
    ),
]


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    with ExitStack() as patches:
        for owner, name, instead in mutation.patches:
            new = looks_once(getattr(owner, name)) if instead is looks_once else instead
            patches.enter_context(mock.patch.object(owner, name, new))
        yield


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.leaves_out)
def test_leaving_it_out_breaks_a_law(mutation: Mutation) -> None:
    with planted(mutation), pytest.raises(Violation, match=mutation.then):
        explore(mutation.world)


@pytest.mark.parametrize(
    "world",
    [a_trainer_and_its_copy, a_trainer_that_goes_on_after_it_was_replaced],
    ids=lambda world: world.__name__,
)
def test_with_everything_in_place_its_world_is_sound(world: Callable[[], World]) -> None:
    explore(world, preemptions=model.PREEMPTIONS)
