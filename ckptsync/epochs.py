"""Trainer attempts: claiming an epoch, and which versions a newer attempt has left behind.

An epoch is claimed by create-if-absent and says what it resumed from. That one fact fences every older attempt
(its versions committed later are dead on arrival) and ends dead branches: after 1..9, a trainer that resumes at 5
publishes e2-v6, and e1-v6..9 are kept but are no longer newer than anything. The idea of a writer epoch in the
log itself is SlateDB's (https://slatedb.io/docs/design/writes).
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

import msgspec

from . import logs
from .channel_record import check_there
from .errors import AlreadyExists, Fenced, InvalidInput, NotFound, StoreUnavailable
from .layout import EPOCHS, claim_path, epoch_of
from .store.base import Store, read_bytes
from .version import VersionId

log = logs.get(__name__)


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """A claim as stored. `resumed_from` is the last version of the older epochs that this attempt goes on from.

    `next_number` is the number of its first version; 0 is kept for the base model.
    """

    number: int
    nonce: str
    run_id: str
    host: str
    created: float
    resumed_from: VersionId | None = None
    next_number: int = 1


def claimed(store: Store) -> list[int]:
    """The numbers of all claimed epochs, ascending."""
    return sorted({n for entry in store.list(EPOCHS) if (n := epoch_of(entry.path)) is not None})


def read_claim(store: Store, number: int, check: Callable[[bytes, str], None] = lambda *_: None) -> Epoch | None:
    """The claim, or None for one whose file cannot be read: it still fences older writers, but ends no branch.

    `check` is given its bytes and its path, and may raise.
    """
    try:
        data = read_bytes(store, claim_path(number), 1 << 16)
        claim = msgspec.json.decode(data, type=Epoch)
        check(data, claim_path(number))
        return claim if claim.number == number else None
    except (msgspec.DecodeError, NotFound):
        log.warning(
            "epoch claim %s is unreadable; it fences older writers but ends no branch",
            claim_path(number),
            extra={"event": "claim-unreadable"},
        )
        return None


def claim(
    store: Store,
    run_id: str,
    resumed_from: VersionId | None,
    next_number: int,
    sign: Callable[[bytes], bytes] | None = None,
) -> Epoch:
    """Claim the next epoch. Of several callers at once each gets its own number; the highest fences the others.
    `sign` makes of the claim's bytes those to store.

    A lost *answer* is told from a lost *race* by reading the claim back and comparing the nonce.
    """
    nonce = uuid.uuid4().hex
    while True:
        number = max(claimed(store), default=0) + 1
        mine = Epoch(
            number=number,
            nonce=nonce,
            run_id=run_id,
            host=f"{socket.gethostname()}:{os.getpid()}",
            created=time.time(),
            resumed_from=resumed_from,
            next_number=next_number,
        )
        if resumed_from is not None and resumed_from.epoch >= number:
            raise InvalidInput(f"cannot resume from {resumed_from}: epoch {number} would not be newer")
        data = msgspec.json.encode(mine)
        if _create_claim(store, mine, sign(data) if sign else data):
            return mine


def _create_claim(store: Store, mine: Epoch, data: bytes) -> bool:
    try:
        store.create(claim_path(mine.number), data)
    except AlreadyExists:
        return _is_ours(store, mine)
    except StoreUnavailable:
        if not _is_ours(store, mine):
            raise
    return True


def _is_ours(store: Store, mine: Epoch) -> bool:
    found = read_claim(store, mine.number)
    return found is not None and found.nonce == mine.nonce


def check_fence(store: Store, mine: Epoch) -> None:
    """Raise Fenced if a newer epoch exists, or if our claim is gone or was overwritten (a store without
    create-if-absent); StoreUnavailable if the whole channel is gone, which fences nobody."""
    numbers = claimed(store)
    newest = max(numbers, default=0)
    if newest < mine.number:
        check_there(store)
    if newest > mine.number:
        other = read_claim(store, newest)
        who = f" by {other.host} (run {other.run_id})" if other else ""
        raise Fenced(f"epoch {newest} was claimed{who}: this publisher holds epoch {mine.number} and must stop")
    found = read_claim(store, mine.number)
    if found is None:
        check_there(store)
        what = "cannot be read" if mine.number in numbers else "is gone (was it deleted?)"
        path = f"{store.url}/{claim_path(mine.number)}"
        raise Fenced(f"the claim {path} {what}: make a new Publisher, which claims an epoch of its own")
    if found.nonce != mine.nonce:
        raise Fenced(f"epoch {mine.number} is no longer ours: another publisher claimed the same one")


def live(versions: Iterable[VersionId], claims: Mapping[int, Epoch | None]) -> list[VersionId]:
    """The versions on the line of the newest attempt, ascending: its own, and what it went on from, back to the start.

    Everything else was left behind: what an older attempt committed after the point from which a newer one resumed.
    Resuming from a version that was left behind brings its own line back.
    """
    versions = list(versions)
    last = _line({v.epoch for v in versions} | set(claims), claims)
    return sorted(v for v in versions if v.epoch in last and v <= last[v.epoch])


def _line(epochs: set[int], claims: Mapping[int, Epoch | None]) -> dict[int, VersionId]:
    """epoch -> its last live version. An epoch whose claim is missing or unreadable ends no branch."""
    last: dict[int, VersionId] = {}
    fork: VersionId | None = None
    for number in sorted(epochs, reverse=True):
        if fork is not None and fork.epoch != number:
            continue
        last[number] = fork or VersionId(number, _ENDLESS)
        found = claims.get(number)
        if found is not None and found.resumed_from is None:
            break
        fork = found.resumed_from if found else None
    return last


_ENDLESS = 1 << 62
