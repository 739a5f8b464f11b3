"""The levels of proof: each fault is planted, and meets the error of its level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptsync.canary import Canary
from ckptsync.errors import EngineRefused, EngineUnavailable, InvalidInput
from ckptsync.testing.engines import Checksummed, Computing, FakeEngine
from watchers.health import Health

from .actions import Watch, flip, receipt_of, shard_of, step, weights
from .publish import SCHEMA, SPECS, TestPublisher

CANARY = Canary(prompt_ids=(1, 2, 3), output_ids=(4, 5), logprobs=(-0.5, -0.5), atol=0.1)


@pytest.mark.parametrize("level", [0, 5, -1, True])
def test_there_is_no_level_without_digests(watch: Watch, publisher: TestPublisher, level: int) -> None:
    with pytest.raises(InvalidInput, match="digests are always taken"):
        watch(FakeEngine(SCHEMA), proof=level)


# 1 and 2: before the engine is touched


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_a_flipped_bit_is_seen_at_every_level(watch: Watch, publisher: TestPublisher, root: str, level: int) -> None:
    engine = Computing(SCHEMA)
    flip(shard_of(root, publisher.publish(canary=CANARY)))
    receipt = step(watch(engine, proof=level))
    assert (receipt.state, receipt.error and receipt.error["kind"]) == ("refused", "bad-shard")
    assert engine.calls == []


def test_a_tensor_that_the_engine_needs_is_missed_from_level_2_on_which_is_the_default(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine = FakeEngine(SCHEMA)
    publisher.publish(specs=SPECS[:-1])
    receipt = step(watch(engine))
    assert (receipt.state, receipt.error and receipt.error["kind"]) == ("refused", "schema-mismatch")
    assert engine.calls == []
    assert step(watch(engine, proof=1)).state == "serving"


# 3: what the paused engine holds


def test_an_engine_that_keeps_one_tensor_old_is_told_by_its_checksum_from_a_trusted_one(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    manifests = [publisher.publish(), publisher.publish()]
    trusted = {m.content_digest: weights(root, m) for m in manifests}
    engine = Checksummed(SCHEMA)
    engine.stale = "e1-v2"
    watcher = watch(engine, proof=3, trusted=trusted, follow="every")
    assert step(watcher).state == "serving"
    receipt = step(watcher)
    assert (receipt.state, receipt.label) == ("failed", "e1-v1")
    assert receipt.error is not None
    assert receipt.error["kind"] == "proof-failed"
    assert "level 3: e1-v2 has checksum all new but one in the engine" in receipt.error["message"]
    assert engine.weights == weights(root, manifests[0])
    assert watcher.step() is None, "it is remembered"


def test_without_a_trusted_one_the_first_checksum_of_a_content_proves_nothing(
    watch: Watch, publisher: TestPublisher
) -> None:
    """The control of the test before: level 2 serves it."""
    engine = Checksummed(SCHEMA)
    engine.stale = "e1-v1"
    publisher.publish()
    assert step(watch(engine)).state == "serving"


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [(Checksummed(SCHEMA), "ckptsync selfcheck"), (FakeEngine(SCHEMA), "plugin"), (Checksummed(SCHEMA), "plugin")],
)
def test_level_3_where_it_cannot_be_had_is_refused_before_the_pause_with_a_remedy(
    watch: Watch, publisher: TestPublisher, engine: FakeEngine, remedy: str
) -> None:
    publisher.publish()
    watcher = watch(engine, proof=3)
    receipt = step(watcher)
    assert receipt.state == "refused"
    assert receipt.error is not None
    assert receipt.error["kind"] == "proof-unavailable"
    assert remedy in receipt.error["message"]
    assert engine.calls == []
    assert watcher.step() is None


def test_an_engine_that_promised_to_read_back_and_did_not_is_brought_back(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine = Checksummed(SCHEMA)
    engine.how = "values"
    publisher.publish()
    receipt = step(watch(engine, proof=3))
    assert receipt.state == "dirty", "there is nothing to go back to"
    assert receipt.error is not None
    assert "level 3: e1-v1 was loaded, but its values were neither read back" in receipt.error["message"]


# 4: what it computes


def test_a_canary_is_replayed_right_after_the_resume_and_the_engine_is_not_ready_before_it_passed(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine, seen = Computing(SCHEMA), list[Health]()
    watcher = watch(engine, proof=4, on_change=seen.append)
    for _ in range(2):
        publisher.publish(canary=CANARY)
        assert step(watcher).state == "serving"
    assert engine.calls[-2:] == ["resume", "score e1-v2"]
    on_probation = [health for health in seen if health.state == "probation"]
    assert [(health.ready, health.version) for health in on_probation] == [(False, "")] * 2
    assert [h.ready for h in seen[seen.index(on_probation[1]) :]] == [False, True]


def test_an_engine_that_computes_something_else_though_its_weights_are_right_is_brought_back(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    engine, good = Computing(SCHEMA), publisher.publish(canary=CANARY)
    watcher = watch(engine, proof=4)
    step(watcher)
    engine.says["e1-v2"] = -0.7
    engine.calls.clear()
    publisher.publish(canary=CANARY)
    receipt = step(watcher)
    assert (receipt.state, receipt.label) == ("failed", "e1-v1")
    assert receipt.error is not None
    assert receipt.error["kind"] == "proof-failed"
    for words in ("level 4", "output position 0 (token 4)", "is -0.7000 and the recorded one -0.5000"):
        assert words in receipt.error["message"]
    assert engine.calls == [
        "pause", "start e1-v2", "update e1-v2", "finish e1-v2", "confirm e1-v2", "resume", "score e1-v2",
        "pause", "start e1-v1", "update e1-v1", "finish e1-v1", "confirm e1-v1", "resume", "score e1-v1",
    ]  # fmt: skip
    assert engine.weights == weights(root, good)
    assert (watcher.health.ready, watcher.health.version) == (True, "e1-v1")
    said = receipt_of(root)
    assert (said["state"], said["proof"]) == ("failed", 4)
    assert watcher.step() is None, "it is remembered"
    publisher.publish(canary=CANARY)
    assert step(watcher).label == "e1-v3"


def test_below_level_4_no_canary_is_replayed(watch: Watch, publisher: TestPublisher) -> None:
    engine = Computing(SCHEMA)
    engine.says["e1-v1"] = -9.0
    publisher.publish(canary=CANARY)
    assert step(watch(engine, proof=3)).state == "serving"
    assert engine.calls[-1] == "resume"


def test_where_level_3_cannot_be_had_the_canary_stands_for_it_and_the_receipt_says_so(
    watch: Watch, publisher: TestPublisher
) -> None:
    publisher.publish(canary=CANARY)
    for engine, says in ((OnlyComputes(SCHEMA), True), (Computing(SCHEMA), False)):
        receipt = step(watch(engine, proof=4))
        assert receipt.state == "serving"
        assert any("the canary stands for it" in warning for warning in receipt.warnings) is says
    assert step(watch(OnlyComputes(SCHEMA), proof=3)).state == "refused"


class OnlyComputes(Computing):
    """As a stock engine: its values are not read back."""

    def read_back(self) -> Any:
        return "none"

    def confirm(self, version: Any) -> Any:
        return replace(super().confirm(version), read_back=False)


@pytest.mark.parametrize(
    ("engine", "canary", "why"),
    [(Computing(SCHEMA), None, "without a canary"), (Checksummed(SCHEMA), CANARY, "cannot give log-probabilities")],
)
def test_level_4_where_it_cannot_be_had_is_refused_before_the_pause(
    watch: Watch, publisher: TestPublisher, engine: Any, canary: Canary | None, why: str
) -> None:
    engine.how = "values"
    publisher.publish(canary=canary)
    receipt = step(watch(engine, proof=4))
    assert receipt.state == "refused"
    assert receipt.error is not None
    assert receipt.error["kind"] == "proof-unavailable"
    assert why in receipt.error["message"]
    assert engine.calls == []


def test_with_nothing_to_go_back_to_it_is_left_paused_and_not_ready(watch: Watch, publisher: TestPublisher) -> None:
    engine = Computing(SCHEMA)
    engine.says["e1-v1"] = -9.0
    publisher.publish(canary=CANARY)
    watcher = watch(engine, proof=4)
    assert step(watcher).state == "dirty"
    assert engine.paused
    assert (watcher.health.ready, watcher.health.state) == (False, "dirty")
    assert "level 4" in watcher.health.reason


def test_an_engine_that_fails_the_canary_of_the_last_good_version_too_is_left_paused(
    watch: Watch, publisher: TestPublisher
) -> None:
    """Such as one that computes something else after every reload, case 89."""
    engine = Computing(SCHEMA)
    publisher.publish(canary=CANARY)
    watcher = watch(engine, proof=4, poll=60.0)
    step(watcher)
    engine.says = {"e1-v1": -9.0, "e1-v2": -9.0}
    publisher.publish(canary=CANARY)
    assert step(watcher).state == "dirty"
    assert engine.paused
    assert not watcher.health.ready


def test_after_an_ordinary_failure_the_last_good_version_has_to_pass_its_canary_too(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine = Computing(SCHEMA)
    publisher.publish(canary=CANARY)
    watcher = watch(engine, proof=4)
    step(watcher)
    engine.fail("update")
    publisher.publish(canary=CANARY)
    assert step(watcher).state == "failed"
    assert engine.calls[-2:] == ["resume", "score e1-v1"]


def test_an_engine_that_does_not_answer_a_canary_is_brought_back_and_tried_again_later(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine = Computing(SCHEMA)
    publisher.publish(canary=CANARY)
    watcher = watch(engine, proof=4)
    step(watcher)
    engine.fail("score", EngineUnavailable)
    publisher.publish(canary=CANARY)
    assert step(watcher).state == "failed"
    watcher._refusals._clock = lambda: float("inf")
    assert step(watcher).label == "e1-v2"


def test_an_engine_that_was_not_resumed_is_not_ready_before_it_was_loaded_again_with_its_canary(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine = Computing(SCHEMA)
    publisher.publish(canary=CANARY)
    watcher = watch(engine, proof=4)
    engine.fail("resume", EngineUnavailable, times=3)
    step(watcher)
    assert engine.paused
    assert (watcher.health.ready, watcher.health.version) == (False, "")
    step(watcher)
    assert engine.calls[-2:] == ["resume", "score e1-v1"]
    assert watcher.health.ready


def test_an_interrupt_during_a_canary_is_raised_again_after_the_way_back(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    engine, good = Computing(SCHEMA), publisher.publish(canary=CANARY)
    watcher = watch(engine, proof=4)
    step(watcher)
    publisher.publish(canary=CANARY)
    engine.fail("score", KeyboardInterrupt)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        watcher.step()
    assert (engine.weights, engine.paused) == (weights(root, good), False)
    assert (watcher.health.ready, watcher.health.version) == (True, "e1-v1")
    assert step(watcher).label == "e1-v2", "an interrupt says nothing about the version"


@pytest.mark.parametrize(
    ("error", "left"), [(EngineUnavailable, "does not answer"), (EngineRefused, "could not be paused")]
)
def test_an_engine_that_cannot_be_paused_again_is_not_ready(
    watch: Watch, publisher: TestPublisher, error: type[Exception], left: str
) -> None:
    engine = Computing(SCHEMA)
    publisher.publish(canary=CANARY)
    watcher = watch(engine, proof=4, poll=60.0)
    step(watcher)
    engine.says["e1-v2"] = -9.0
    score = engine.score

    def score_and_lose_the_pause(token_ids: Any, first: int) -> list[float]:
        engine.fail("pause", error, times=9)
        return score(token_ids, first)

    engine.score = score_and_lose_the_pause  # type: ignore[method-assign]
    publisher.publish(canary=CANARY)
    assert step(watcher).state == "dirty"
    assert not watcher.health.ready
    assert watcher.health.reason.startswith(f"it {left}: level 4")
