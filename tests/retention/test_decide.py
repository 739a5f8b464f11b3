"""What may go: law by law, and the laws over random histories."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import InvalidInput
from ckptsync.manifest import Origin, Parent
from ckptsync.retention import Candidate, Plan, Retention, decide, needs_of
from ckptsync.version import VersionId
from tests.core.manifests import manifest

TWO = Retention(keep_last=2)


def v(number: int, epoch: int = 1) -> VersionId:
    return VersionId(epoch, number)


def full(number: int, *, epoch: int = 1, size: int = 10, age: float = 0.0) -> Candidate:
    return Candidate(v(number, epoch), "full", (), size, age)


def delta(number: int, *, size: int = 1) -> Candidate:
    return Candidate(v(number), "delta", (v(number - 1),), size, 0.0)


def plan(policy: Retention, versions: list[Candidate], **options: object) -> Plan:
    live = options.pop("live", {each.id for each in versions})
    return decide(policy, versions, live=live, **{"held": {}, **options})  # type: ignore[arg-type]


def kept(found: Plan) -> list[int]:
    return [version.number for version in found.keep]


def test_the_newest_stay_and_the_others_go_newest_first():
    found = plan(Retention(keep_last=3), [full(n) for n in range(1, 7)])
    assert kept(found) == [4, 5, 6]
    assert found.go == (v(3), v(2), v(1))
    assert found.keep[v(6)] == "the newest"
    assert found.keep[v(5)] == "among the 3 newest"


@pytest.mark.parametrize("field", ["keep_last", "keep_adapters"])
@pytest.mark.parametrize("value", [1, 0, -1, True, 2.0])
def test_case_5_fewer_than_two_is_refused(field, value):
    """The newest version may be the one that no engine can load."""
    with pytest.raises(InvalidInput, match=f"{field}=.*at least 2"):
        Retention(**{"keep_last": 2, field: value})


@pytest.mark.parametrize("wrong", [{"keep_every": 0}, {"max_bytes": 0}, {"max_age": 0.0}, {"grace": -1.0}])
def test_a_policy_that_cannot_be_meant_is_refused_by_name(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Retention(keep_last=2, **wrong)


def test_the_data_may_go_at_once():
    assert Retention(keep_last=2, grace=0.0).grace == 0.0


def test_every_tenth_stays():
    found = plan(Retention(keep_last=2, keep_every=10), [full(n) for n in range(1, 34)])
    assert kept(found) == [10, 20, 30, 32, 33]
    assert found.keep[v(20)] == "its number is a multiple of 10"


def test_history_ends_at_its_age_and_the_newest_do_not():
    versions = [full(n, age=100.0 * (10 - n)) for n in range(1, 11)]
    assert kept(plan(Retention(keep_last=2, max_age=500.0), versions)) == [5, 6, 7, 8, 9, 10]
    assert kept(plan(Retention(keep_last=2, keep_every=3, max_age=500.0), versions)) == [6, 9, 10]
    assert kept(plan(Retention(keep_last=4, max_age=50.0), versions)) == [7, 8, 9, 10]
    assert plan(Retention(keep_last=2, max_age=500.0), versions).keep[v(5)] == "history within the limits"


def test_a_version_that_looks_too_old_between_others_takes_none_with_it():
    """Ages are by a store's clock, which may have been wrong for a while."""
    versions = [full(n, age=1e6 if n == 5 else 0.0) for n in range(1, 11)]
    assert kept(plan(Retention(keep_last=2, max_age=500.0), versions)) == [1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_history_ends_where_it_weighs_too_much_and_the_newest_count():
    versions = [full(n) for n in range(1, 11)]
    assert kept(plan(Retention(keep_last=2, max_bytes=55), versions)) == [6, 7, 8, 9, 10]
    assert kept(plan(Retention(keep_last=4, max_bytes=15), versions)) == [7, 8, 9, 10]


def test_a_delta_and_a_rollback_need_another_version_and_a_full_version_with_changes_besides_does_not():
    base = {"epoch": 1, "number": 1}
    parent = Parent(**base, content_digest="0" * 64)
    assert needs_of(manifest(number=2, kind="delta", parent=parent)) == (v(1),)
    assert needs_of(manifest(number=2, parent=parent)) == ()
    assert needs_of(manifest(number=2, format=2, data_of=Origin(**base, nonce="n"))) == (v(1),)


def test_what_a_kept_delta_is_made_from_stays():
    versions = [full(1), delta(2), delta(3), full(4), delta(5), delta(6)]
    found = plan(TWO, versions)
    assert kept(found) == [4, 5, 6]
    assert found.keep[v(4)] == "needed by e1-v6"
    assert kept(plan(TWO, versions, held={v(3): "pinned"})) == [1, 2, 3, 4, 5, 6]


def test_the_bytes_of_a_chain_count_when_one_link_is_wanted():
    versions = [full(1), delta(2), delta(3), full(4), full(5)]
    assert kept(plan(Retention(keep_last=2, max_bytes=31), versions)) == [4, 5], "3 needs 1 and 2: 12 more bytes"
    assert kept(plan(Retention(keep_last=2, max_bytes=32), versions)) == [1, 2, 3, 4, 5]


def test_what_others_hold_stays_and_the_plan_says_who():
    found = plan(TWO, [full(n) for n in range(1, 9)], held={v(2): "leased by a", v(4): "served by b"})
    assert kept(found) == [2, 4, 7, 8]
    assert found.keep[v(2)] == "leased by a"


def test_adapters_have_a_window_of_their_own():
    adapters = [Candidate(v(n), "adapter", (), 1, 0.0) for n in range(4, 10)]
    found = plan(Retention(keep_last=2, keep_adapters=3), [full(1), full(2), full(3), *adapters])
    assert kept(found) == [2, 3, 7, 8, 9]


def test_the_base_model_stays():
    found = plan(TWO, [full(n) for n in range(6)])
    assert kept(found) == [0, 4, 5]
    assert found.keep[v(0)] == "the base model"


def test_case_22_the_newest_of_a_branch_that_was_left_behind_stay_unless_told_otherwise():
    versions = [full(n) for n in range(1, 10)] + [full(n, epoch=2) for n in range(6, 12)]
    live = {v(n) for n in range(1, 6)} | {v(n, 2) for n in range(6, 12)}
    found = plan(TWO, versions, live=live)
    assert list(found.keep) == [v(8), v(9), v(10, 2), v(11, 2)]
    assert found.keep[v(9)] == "the newest of a branch that was left behind"
    alone = plan(Retention(keep_last=2, keep_branches=False), versions, live=live)
    assert list(alone.keep) == [v(10, 2), v(11, 2)]


def test_a_manifest_that_is_torn_keeps_itself_and_one_of_a_newer_release_all_before_it():
    versions = [full(n) for n in (1, 2, 4, 5, 6)]
    found = plan(TWO, versions, unreadable={v(3): False})
    assert kept(found) == [3, 5, 6]
    assert found.keep[v(3)] == "its manifest cannot be read"
    assert kept(plan(TWO, versions, unreadable={v(3): True})) == [1, 2, 3, 5, 6]


class History(NamedTuple):
    versions: list[Candidate]
    live: set[VersionId]
    held: dict[VersionId, str]
    policy: Retention


@st.composite
def histories(draw: st.DrawFn) -> History:
    versions: list[Candidate] = []
    line: list[VersionId] = []
    for epoch in range(1, draw(st.integers(1, 4)) + 1):
        line = line[: draw(st.integers(0, len(line)))] if epoch > 1 else []
        for _ in range(draw(st.integers(0, 8))):
            version = VersionId(epoch, line[-1].number + 1 if line else draw(st.integers(0, 1)))
            kind = draw(st.sampled_from(["full", "delta", "delta", "adapter"])) if line else "full"
            needs = (draw(st.sampled_from(line)),) if kind == "delta" else ()
            size, age = draw(st.integers(1, 20)), draw(st.floats(-1e9, 1e9))
            versions.append(Candidate(version, kind, needs, size, age))
            line.append(version)
    ids = [each.id for each in versions]
    held = draw(st.lists(st.sampled_from(ids), max_size=4)) if ids else []
    policy = Retention(
        keep_last=draw(st.integers(2, 5)),
        keep_every=draw(st.none() | st.integers(1, 4)),
        max_bytes=draw(st.none() | st.integers(1, 200)),
        max_age=draw(st.none() | st.floats(1.0, 1e9)),
        keep_adapters=draw(st.integers(2, 4)),
        keep_branches=draw(st.booleans()),
    )
    return History(draw(st.permutations(versions)), set(line), dict.fromkeys(held, "held"), policy)


@given(histories())
def test_law_9_holds_whatever_the_policy(history):
    found = decide(history.policy, history.versions, live=history.live, held=history.held)
    by_id = {each.id: each for each in history.versions}
    keep = set(found.keep)
    assert keep | set(found.go) == set(by_id)
    assert not keep & set(found.go)
    assert list(found.go) == sorted(found.go, reverse=True)
    assert set(history.held) <= keep
    assert all(need in keep for version in keep for need in by_id[version].needs)
    live = sorted(history.live)
    weights = [version for version in live if by_id[version].kind != "adapter"]
    adapters = [version for version in live if by_id[version].kind == "adapter"]
    assert set(live[-1:]) | set(weights[-history.policy.keep_last :]) <= keep
    assert set(adapters[-history.policy.keep_adapters :]) <= keep
    assert all(found.keep.values()), "each has a reason"


@given(histories())
def test_deciding_again_about_what_stayed_lets_nothing_more_go(history):
    found = decide(history.policy, history.versions, live=history.live, held=history.held)
    left = [each for each in history.versions if each.id in found.keep]
    again = decide(history.policy, left, live=history.live & found.keep.keys(), held=history.held)
    assert again.go == ()


@given(histories())
def test_history_stays_within_its_limits(history):
    """What stays beyond what must is within the bytes and the age, and of the numbers that were asked for."""
    policy = history.policy
    found = decide(policy, history.versions, live=history.live, held=history.held)
    bare = Retention(keep_last=policy.keep_last, keep_adapters=policy.keep_adapters, keep_branches=policy.keep_branches)
    must = decide(bare, history.versions, live=history.live, held=history.held).keep
    by_id = {each.id: each for each in history.versions}
    extra = [version for version in found.keep if version not in must]
    if policy.max_bytes is not None and extra:
        assert sum(by_id[version].nbytes for version in found.keep) <= policy.max_bytes
    wanted = [version for version in extra if not found.keep[version].startswith("needed by")]
    assert all(version.number % policy.every == 0 for version in wanted)
    assert all(policy.max_age is None or by_id[version].age <= policy.max_age for version in wanted)
