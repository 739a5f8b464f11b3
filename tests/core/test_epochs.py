from hypothesis import given
from hypothesis import strategies as st

from ckptsync.epochs import Epoch, live
from ckptsync.version import VersionId


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
