import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync import Channel
from ckptsync.channel_record import create_record
from ckptsync.epochs import Epoch, check_fence, claim, claimed, live, read_claim
from ckptsync.errors import Fenced, InvalidInput
from ckptsync.layout import claim_path
from ckptsync.testing.memory import MemoryStore
from ckptsync.version import VersionId
from tests.mirror.channels import Trainer


def claims(**resumed_from):
    """claims(e1=None, e2=(1, 5)) -> two epochs, the second resumed from e1-v5."""
    found = {}
    for name, fork in resumed_from.items():
        number = int(name[1:])
        base = VersionId(*fork) if fork else None
        found[number] = Epoch(number=number, nonce="n", run_id="r", host="h", created=0.0, resumed_from=base)
    return found


def ids(*pairs):
    return [VersionId(*pair) for pair in pairs]


def test_versions_of_one_attempt_are_all_live():
    assert live(ids((1, 2), (1, 1)), claims(e1=None)) == ids((1, 1), (1, 2))


def test_case_22_what_came_after_the_fork_is_left_behind():
    history = ids(*[(1, n) for n in range(1, 10)], (2, 6))
    found = live(history, claims(e1=None, e2=(1, 5)))
    assert found == ids((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 6))


def test_a_claim_alone_ends_the_dead_branch_before_the_first_publish():
    assert live(ids((1, 5), (1, 6)), claims(e1=None, e2=(1, 5))) == ids((1, 5))


def test_a_zombie_of_an_older_epoch_is_dead_on_arrival():
    assert live(ids((1, 7), (1, 8)), claims(e1=None, e2=(1, 7))) == ids((1, 7))


def test_a_dead_branch_stays_dead_when_later_attempts_go_on_from_the_live_one():
    history = ids((1, 4), (1, 7), (2, 6), (2, 12), (3, 13))
    found = live(history, claims(e1=None, e2=(1, 5), e3=(2, 12)))
    assert found == ids((1, 4), (2, 6), (2, 12), (3, 13))


def test_an_attempt_that_resumed_from_nothing_leaves_everything_older_behind():
    assert live(ids((1, 1), (2, 1)), claims(e1=None, e2=None)) == ids((2, 1))


def test_an_unreadable_claim_ends_no_branch():
    assert live(ids((1, 9)), {**claims(e1=None), 2: None}) == ids((1, 9))


@given(st.data())
def test_live_agrees_with_walking_back_from_the_newest_attempt(data):
    """The reference: from the newest epoch, follow `resumed_from` back; each stretch of one epoch up to it is live."""
    epochs, forks = data.draw(st.integers(1, 4)), {}
    for number in range(1, epochs + 1):
        older = st.tuples(st.integers(1, number - 1), st.integers(0, 6)) if number > 1 else st.none()
        forks[f"e{number}"] = data.draw(st.none() | older)
    history = ids(*data.draw(st.lists(st.tuples(st.integers(1, epochs), st.integers(0, 6)), unique=True)))
    expected, epoch, last = set(), epochs, VersionId(epochs, 1 << 60)
    while True:
        expected |= {v for v in history if v.epoch == epoch and v <= last}
        fork = forks[f"e{epoch}"]
        if fork is None:
            break
        epoch, last = fork[0], VersionId(*fork)
    assert live(history, claims(**forks)) == sorted(expected)


def test_resuming_from_a_branch_that_was_left_behind_brings_it_back():
    history = ids((1, 5), (1, 9), (2, 6), (2, 7))
    assert live(history, claims(e1=None, e2=(1, 5), e3=(1, 9))) == ids((1, 5), (1, 9))


def test_epochs_are_numbered_from_one_and_a_claim_is_read_as_it_was_made():
    store = MemoryStore()
    first, second = claim(store, "a", None, 1), claim(store, "b", VersionId(1, 4), 5)
    assert (first.number, second.number, claimed(store)) == (1, 2, [1, 2])
    assert (read_claim(store, 1), read_claim(store, 2)) == (first, second)
    assert (second.run_id, second.resumed_from, second.next_number) == ("b", VersionId(1, 4), 5)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", msgspec.json.encode(claims(e2=None)[2])])
def test_a_claim_that_cannot_be_read_or_is_of_another_epoch_fences_and_says_no_more(data):
    store = MemoryStore()
    mine = claim(store, "a", None, 1)
    check_fence(store, mine)
    store.files[claim_path(3)] = data
    assert read_claim(store, 3) is None
    with pytest.raises(Fenced, match=r"^epoch 3 was claimed: this publisher holds epoch 1 and must stop$"):
        check_fence(store, mine)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, r"^the claim .*/epochs/e0001\.json is gone \(was it deleted\?\): make a new Publisher"),
        (b'{"torn', r"^the claim .*/epochs/e0001\.json cannot be read: make a new Publisher"),
        (
            msgspec.json.encode(claims(e1=None)[1]),
            r"^epoch 1 is no longer ours: another publisher claimed the same one$",
        ),
    ],
)
def test_a_claim_that_is_gone_unreadable_or_anothers_fences_and_is_said_to_be_that(data, said):
    store = MemoryStore()
    mine = claim(store, "a", None, 1)
    create_record(store)
    store.delete(claim_path(1))
    if data is not None:
        store.files[claim_path(1)] = data
    with pytest.raises(Fenced, match=said):
        check_fence(store, mine)


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_goes_on_from_an_older_one_only(epoch):
    with pytest.raises(InvalidInput, match=rf"^cannot resume from e{epoch}-v3: epoch 1 would not be newer$"):
        claim(MemoryStore(), "a", VersionId(epoch, 3), 4)


def test_a_version_that_is_committed_while_an_epoch_is_claimed_does_not_share_its_number(tmp_path, monkeypatch):
    older = Trainer(str(tmp_path))
    older.publish(1)
    channel, listed = Channel.open(str(tmp_path)), Channel.versions

    def and_then_another_commits(self):
        found = listed(self)
        if self is channel and len(found) == 1:
            older.publish(2)
        return found

    monkeypatch.setattr(Channel, "versions", and_then_another_commits)
    claim = channel.claim_epoch("run")
    assert (claim.resumed_from, claim.next_number) == (VersionId(1, 2), 3)
