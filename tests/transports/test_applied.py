"""The receiver's ledger, and a receiver that is told things in the wrong order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptsync.digest import digest
from ckptsync.errors import (
    EngineDirty,
    EngineRefused,
    EngineUnavailable,
    OutOfOrder,
    ProofFailed,
    SchemaMismatch,
    VersionExists,
)
from ckptsync.export.module import find_ties, live_tensors
from ckptsync.lane import once
from ckptsync.shards.tensors import spec_of, tensor_bytes
from ckptsync.transports.applied import Applied
from ckptsync.transports.pair import Pair, meeting_place
from ckptsync.transports.wire import Finish, Join, Names, Start, content_of
from ckptsync.version import VersionId
from tests.trainer.models import TinyModel
from watchers.engines.module import ModuleEngine
from watchers.engines.receiver import Receiver

V1, V2, V3 = (VersionId(1, number) for number in (1, 2, 3))


def test_the_same_identity_and_digest_again_is_held_already() -> None:
    ledger = Applied()
    assert ledger.check(V1, "d1") == ""
    ledger.record(V1, "d1")
    assert ledger.check(V1, "d1") == ledger.check(V1) == "d1"


def test_the_same_identity_with_another_digest_is_an_error() -> None:
    ledger = Applied()
    ledger.record(V1, "d1")
    with pytest.raises(VersionExists, match="e1-v1 is held with other content"):
        ledger.check(V1, "d2")


def test_out_of_order_is_an_error_unless_asked_for() -> None:
    ledger = Applied()
    ledger.record(V2, "d2")
    with pytest.raises(OutOfOrder, match="e1-v1 is older than e1-v2"):
        ledger.check(V1)
    assert ledger.check(V1, allow_older=True) == ""
    assert ledger.check(VersionId(2, 1)) == "", "a newer attempt goes on from before"


def test_what_was_begun_is_not_held_and_still_counts_for_the_order() -> None:
    ledger = Applied()
    ledger.record(V1, "d1")
    ledger.begin(V2)
    assert ledger.version is None
    assert ledger.check(V2, "d2") == "", "a full resend"
    with pytest.raises(OutOfOrder):
        ledger.check(V1, "d1")


class Sender:
    """The other side, in this process."""

    def __init__(self, receiver: Receiver, seed: float) -> None:
        self.receiver, model = receiver, TinyModel(blocks=1)
        state = live_tensors(model)
        self.ties = {"model": find_ties(state)}
        self.state = {n: torch.full_like(t, seed) for n, t in state.items() if n not in self.ties["model"]}
        self.specs = {"model": [spec_of(name, tensor) for name, tensor in self.state.items()]}
        digests = {name: digest(tensor_bytes(tensor)) for name, tensor in self.state.items()}
        self.digest = content_of(self.specs, self.ties, {"model": digests})

    def start(self, version: VersionId, **more: Any) -> str:
        return self.receiver.start(Start(version, self.specs, self.ties, **more)).held

    def join(self, receiver: Receiver | None = None) -> None:
        store = meeting_place("127.0.0.1")
        joining = once("join", lambda: self.receiver.join(Join("127.0.0.1", store.port, 1, 2, 10.0)))
        self.pair = Pair(store, 0, 2, 10.0)
        joining.result()

    def bucket(self, names: list[str]) -> None:
        receiving = once("bucket", lambda: self.receiver.bucket(Names("model", names)))
        for name in names:
            self.pair.broadcast(self.state[name].contiguous())
        receiving.result()

    def send(self, version: VersionId, **more: Any) -> str:
        if held := self.start(version, **more):
            return held
        self.join()
        self.bucket(list(self.state))
        return self.receiver.finish(Finish(version.label, self.digest)).digest


@pytest.fixture
def engine() -> ModuleEngine:
    engine = ModuleEngine(TinyModel(blocks=1))
    engine.pause()
    return engine


@pytest.fixture
def receiver(engine: ModuleEngine) -> Receiver:
    return Receiver(engine)


@pytest.fixture
def sender(receiver: Receiver) -> Callable[[float], Sender]:
    return lambda seed: Sender(receiver, seed)


def test_a_version_is_received_read_back_and_labelled_and_the_same_again_is_a_no_op(
    sender: Callable[[float], Sender], receiver: Receiver, engine: ModuleEngine
) -> None:
    first = sender(1.0)
    assert first.send(V1) == first.digest
    assert engine.status().label == "e1-v1"
    assert all(bool((tensor == 1.0).all()) for tensor in live_tensors(engine.module).values())
    assert first.send(V1, digest=first.digest) == first.digest, "held: nothing is sent"
    with pytest.raises(VersionExists):
        sender(2.0).send(V1, digest=sender(2.0).digest)
    sender(3.0).send(V3)
    with pytest.raises(OutOfOrder):
        sender(2.0).send(V2)
    second = sender(2.0)
    assert second.send(V2, allow_older=True) == second.digest
    found = receiver.read_back()
    assert found is not None
    assert (found.label, found.digest) == ("e1-v2", second.digest)


def test_it_receives_nothing_while_it_computes_or_what_does_not_fit(
    sender: Callable[[float], Sender], engine: ModuleEngine
) -> None:
    engine.resume()
    with pytest.raises(EngineRefused, match="not paused"):
        sender(1.0).start(V1)
    engine.pause()
    wrong = sender(1.0)
    wrong.specs["model"].pop()
    with pytest.raises(SchemaMismatch, match="1 missing"):
        wrong.start(V1)
    with pytest.raises(EngineRefused, match="no send is under way"):
        wrong.receiver.finish(Finish("e1-v1", ""))


def test_half_of_a_version_takes_no_label_and_does_not_let_it_compute(
    sender: Callable[[float], Sender], receiver: Receiver, engine: ModuleEngine
) -> None:
    sender(1.0).send(V1)
    half = sender(2.0)
    half.start(V2)
    half.join()
    half.bucket(list(half.state)[:2])
    assert engine.status().label == ""
    with pytest.raises(EngineDirty, match="tensors did not come"):
        receiver.finish(Finish("e1-v2", half.digest))
    with pytest.raises(EngineRefused, match="e1-v2 is half received"):
        receiver.check_whole()
    assert half.send(V2) == half.digest, "a full resend makes it whole"
    receiver.check_whole()


def test_what_was_damaged_on_the_way_is_found_by_reading_back(
    sender: Callable[[float], Sender], receiver: Receiver, engine: ModuleEngine
) -> None:
    damaged = sender(1.0)
    damaged.start(V1)
    damaged.join()
    damaged.state["five.bias"] = torch.zeros(5)
    damaged.bucket(list(damaged.state))
    with pytest.raises(ProofFailed, match="sent was"):
        receiver.finish(Finish("e1-v1", damaged.digest))
    assert engine.status().label == ""
    with pytest.raises(EngineRefused):
        receiver.check_whole()


def test_while_files_are_being_loaded_a_send_waits_for_its_turn_and_nothing_computes(
    sender: Callable[[float], Sender], receiver: Receiver
) -> None:
    late = sender(2.0)
    with receiver.loading(V1, "a digest"):
        with pytest.raises(EngineUnavailable, match="being loaded by somebody else"):
            late.start(V2)
        with pytest.raises(EngineRefused, match="being loaded at this moment"):
            receiver.check_whole()
    assert late.send(V2) == late.digest
    receiver.check_whole()
