"""Going back for all who follow `latest`: a new version with the weights of an earlier one, and no bytes copied."""

from __future__ import annotations

import time
import uuid

import msgspec

from .channel import Channel
from .errors import InvalidInput, NotFound
from .manifest import SHARED_FORMAT, Manifest, Origin
from .presence import absent_of, sizes
from .reading import leased


def roll_back(channel: Channel, target: Manifest, why: str = "", *, leaving: bool = False) -> Manifest:
    """Commit a version after the newest one whose data, step, metadata and trainer state are `target`'s, and return it.

    It claims an epoch, since a version has one writer: a trainer that still runs raises Fenced at its next publish
    instead of undoing this, and goes on from here when it is started again. `producer["rollback"]` says from where,
    to what and why. Retention keeps `target` as long as the new version. `leaving`: the live versions after `target`
    are left behind, as those that a resume from it leaves; without it they stay on the line, for who asks for one.

    InvalidInput if `target` is the newest already, NotFound if a file of it is not there, VersionGone if it is being
    collected.
    """
    newest = channel.latest()
    if newest.id == target.id:
        raise InvalidInput(f"{target.id} is the newest version already")
    run_id = f"rollback-{uuid.uuid4().hex[:12]}"
    with leased(channel, target.id, run_id, needed=True):
        _check_files(channel, target)
        epoch = channel.claim_epoch(run_id, target.id if leaving else None)
        before = epoch.resumed_from or newest.id
        said = {"to": target.id.label, "from": before.label, "why": why}
        sealed, _ = channel.seal(
            msgspec.structs.replace(
                target,
                format=SHARED_FORMAT,
                epoch=epoch.number,
                number=epoch.next_number,
                nonce=epoch.nonce,
                run_id=run_id,
                created=time.time(),
                producer={**target.producer, "rollback": said},
                data_of=_origin(target),
                previous=before,
            ),
            source=target,
        )
        return channel.commit(epoch, sealed)


def _origin(target: Manifest) -> Origin:
    """Of a rollback to a rollback it is the first one's: who reads follows one step, not many."""
    if isinstance(target.data_of, Origin):
        return target.data_of
    return Origin(epoch=target.epoch, number=target.number, nonce=target.nonce)


def _check_files(channel: Channel, target: Manifest) -> None:
    """Whether the bytes are right is for `verify` and for every reader; that they are there is asked for here."""
    there = sizes(channel.store, target.folder)
    for name, _ in absent_of(target, target.stored_files(), there):
        raise NotFound(f"{target.id} is not whole any more: {target.folder}/{name} is not there as it was published")
