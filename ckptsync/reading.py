"""A lease for as long as a version is read, by whoever has no stage that takes one."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from . import host, logs
from .channel import Channel
from .errors import CkptSyncError, NotFound, StoreError
from .holds import check_not_collected
from .version import VersionId

log = logs.get(__name__)

LEASE_SECONDS = 600.0


@contextmanager
def leased(channel: Channel, version: VersionId, what: str, *, needed: bool = False) -> Iterator[None]:
    """Keep the version from being collected inside `with`; `what` is who reads, for `status`.

    VersionGone if it is being collected already. Where nothing may be written it is read without a lease, with a
    warning: retention does not know of this reader. `needed`: StoreError instead.
    """
    reader = f"{what}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    try:
        channel.lease(reader, version, LEASE_SECONDS)
    except StoreError as error:
        if needed:
            raise
        more = logs.about(version, event="no-lease")
        text = "%s is read without a lease, retention may delete it meanwhile: %s"
        log.warning(text, channel.store.url, error, extra=more)
        yield
        return
    ended = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(channel, version, reader, ended), name="ckptsync-lease", daemon=True
    )
    try:
        check_not_collected(channel, version)
        with host.threads():
            renewing.start()
        yield
    finally:
        ended.set()
        if renewing.ident is not None:
            renewing.join()
        _drop(channel, reader)


def _renew(channel: Channel, version: VersionId, reader: str, ended: threading.Event) -> None:
    while not ended.wait(LEASE_SECONDS / 3):
        try:
            channel.lease(reader, version, LEASE_SECONDS)
        except CkptSyncError as error:
            more = logs.about(version, event="lease-not-renewed")
            log.warning("the lease of %s on %s was not renewed: %s", reader, version, error, extra=more)


def _drop(channel: Channel, reader: str) -> None:
    """It ends by itself too, so a store that is away now changes nothing of what was read."""
    try:
        channel.release(reader)
    except NotFound:
        pass
    except CkptSyncError as error:
        log.warning("the lease of %s stays until it has expired: %s", reader, error, extra={"event": "lease-stays"})
