"""Which version a trainer can go on from, newest first, and why there is none. For rank 0, which decides for all."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from . import errors
from .absent import none_whole
from .channel import Channel
from .errors import BadManifest, ChannelEmpty, CkptSyncError, Corrupt, InvalidInput, NotFound
from .layout import DATA, SELF_COPY
from .manifest import MAIN_TRACK, Manifest
from .reading import leased
from .version import VersionId


class Refusal(NamedTuple):
    """An error that rank 0 decided on, as plain data for the others."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: CkptSyncError) -> Refusal:
        return cls(type(error).__name__, str(error))

    def error(self) -> CkptSyncError:
        kind: type[CkptSyncError] = getattr(errors, self.kind)
        return kind(self.message)


class Offer(NamedTuple):
    """The next version that rank 0 would take: its manifest, or why it is not one to take."""

    version: VersionId
    manifest: bytes
    problem: str = ""


def offered(channel: Channel, version: str | int, wants_state: bool) -> Generator[Offer | Refusal, None, None]:
    """The versions to try, newest first, and at the end the reason why there is none. Each is leased while it is the
    last one offered: close the generator when it is taken. Raises StoreError."""
    try:
        if version != "latest":
            yield from _held(channel, _exactly(channel.resolve(version)))
            return
        tried: list[str] = []
        for offer in _live(channel, wants_state):
            tried.append(f"{offer.version}: {offer.problem or 'its files are not whole'}")
            with suppress(errors.VersionGone):
                yield from _held(channel, offer)
        yield Refusal.of(_nothing(channel, tried))
    except (NotFound, Corrupt, InvalidInput) as error:
        yield Refusal.of(error)


def _held(channel: Channel, offer: Offer | Refusal) -> Iterator[Offer | Refusal]:
    """Leased until the next offer is asked for, or none is any more."""
    if isinstance(offer, Refusal) or offer.problem:
        yield offer
        return
    with leased(channel, offer.version, "resume"):
        yield offer


def _exactly(manifest: Manifest) -> Offer | Refusal:
    if manifest.kind == "adapter":
        return Refusal.of(
            InvalidInput(
                f"{manifest.id} is an adapter version, without the model: resume from a full one, such as "
                "publish(..., merge_lora=True) makes"
            )
        )
    if MAIN_TRACK not in manifest.tracks:
        there = ", ".join(manifest.tracks)
        return Refusal.of(InvalidInput(f"{manifest.id} has no track {MAIN_TRACK!r} to resume from, but {there}"))
    return Offer(manifest.id, manifest.encoded)


def _live(channel: Channel, wants_state: bool) -> Iterator[Offer]:
    # One manifest at a time, which may weigh megabytes, and no more of them than it takes to find a whole version.
    wants_state = wants_state and any(manifest and manifest.trainer_state for _, manifest, _ in _readable(channel))
    for version, manifest, problem in _readable(channel):
        if manifest is None:
            yield Offer(version, b"", problem)
        elif wants_state and not manifest.trainer_state:
            yield Offer(version, b"", "it was published without trainer state")
        elif isinstance(offer := _exactly(manifest), Offer):
            yield offer


def _readable(channel: Channel) -> Iterator[tuple[VersionId, Manifest | None, str]]:
    for version in reversed(channel.versions()):
        try:
            yield version, channel.manifest(version), ""
        except errors.VersionNotFound:
            continue  # collected between the listing and the read
        except Corrupt as error:
            yield version, None, str(error)


def _nothing(channel: Channel, tried: Sequence[str]) -> CkptSyncError:
    url = channel.store.url
    if tried:
        whole = any(manifest for _, manifest, _ in _readable(channel))
        kind = BadManifest if whole else type(none_whole(url, channel.versions(), channel.manifest))
        return kind(f"{url} has versions, and none can be resumed from: {'; '.join(tried)}")
    if channel.committed():
        return BadManifest(f"{url} has versions, and none is live, complete and full")
    sealed = [entry.path for entry in channel.store.list(DATA) if entry.path.endswith(f"/{SELF_COPY}")]
    if sealed:
        folder = sealed[0].rpartition("/")[0]
        return BadManifest(
            f"{url} has no manifest, but {folder} was whole: was manifests/ lost? `ckptsync import` {folder}, or "
            "delete it if a first publish was killed there, before starting anew"
        )
    return ChannelEmpty(f"{url} has no version yet: nothing to resume from")
