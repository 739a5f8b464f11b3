"""Questions to a root, answered by trying: can this storage carry a channel, and is the channel on it healthy?"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator

import msgspec

from .channel import Channel
from .channel_record import copied_again
from .errors import ChannelEmpty, CkptSyncError, Corrupt, NotFound, StoreDenied, StoreFull
from .fsck import newest_missing
from .layout import ADAPTER_CONFIG
from .replaced import replaced_manifests
from .store.base import Store, put_bytes, read_bytes
from .store.probe import deleted_after, enforces_create
from .sweep import leftovers
from .trials import TRIALS, drop_folder, sweep_trials
from .wording import counted, human_bytes

SAMPLE = 32_000_000


class Check(msgspec.Struct, frozen=True):
    """One answer. `status` is ok, warn or bad; `remedy` says what to do about the latter two."""

    name: str
    status: str
    detail: str
    remedy: str = ""
    names: tuple[str, ...] = ()
    """What the detail counts, such as folders, to be copied."""


def examine(channel: Channel, stage: str) -> Iterator[Check]:
    """Run every check, in order; the first that the store refuses ends the run. Leaves no file behind."""
    store = channel.store
    steps: list[Callable[[], Iterator[Check]]] = [
        lambda: _reading(store),
        lambda: _writing(store),
        lambda: _versions(channel),
        lambda: _files(channel),
        lambda: _adapters(channel),
        lambda: _debris(channel),
        lambda: _stage(channel, stage),
    ]
    for step in steps:
        try:
            yield from step()
        except CkptSyncError as error:
            yield Check("store", "bad", f"{error.kind}: {error}", _remedy(error))
            return


def _remedy(error: CkptSyncError) -> str:
    if isinstance(error, StoreFull):
        return "make room, or raise the quota: `ckptsync gc` deletes old versions, and reading works meanwhile"
    return "check the root, the network and the credentials"


def _reading(store: Store) -> Iterator[Check]:
    start = time.perf_counter()
    sum(1 for _ in store.list("manifests"))
    yield Check("listing", "ok", f"{store.url} answers in {(time.perf_counter() - start) * 1000:.0f} ms")


def _writing(store: Store) -> Iterator[Check]:
    try:
        sweep_trials(store)
        yield from _written(store)
    except StoreDenied as error:
        yield Check("writing", "warn", str(error), "reading works, so watchers can run; publishing cannot")
    finally:
        drop_folder(store)


def _written(store: Store) -> Iterator[Check]:
    path = f"{TRIALS}/{uuid.uuid4().hex}"
    data = os.urandom(1_000_000) * (SAMPLE // 1_000_000)
    with deleted_after(store, path):
        start = time.perf_counter()
        put_bytes(store, path, data)
        written = time.perf_counter()
        entries = [entry for entry in store.list(TRIALS) if entry.path == path]
        same = read_bytes(store, path, SAMPLE) == data
        yield _rates(start, written, time.perf_counter())
        yield _visible(bool(entries), same)
        if entries:
            yield _clock(entries[0].modified)
    yield _exclusive(store)


def _rates(start: float, written: float, read: float) -> Check:
    megabytes = SAMPLE / 1e6
    rates = f"wrote {megabytes / (written - start):.0f} MB/s durably, read {megabytes / (read - written):.0f} MB/s"
    return Check("throughput", "ok", f"{rates} (one {megabytes:.0f} MB file)")


def _visible(listed: bool, same: bool) -> Check:
    if listed and same:
        return Check("visibility", "ok", "a file is listed and reads back whole as soon as it is written")
    what = "is not listed at once" if not listed else "reads back other bytes"
    return Check("visibility", "bad", f"a file just written {what}", "turn off caches of this mount or gateway")


def _clock(modified: float) -> Check:
    skew = modified - time.time()
    status = "ok" if abs(skew) < 30 else "warn"
    return Check(
        "clock",
        status,
        f"the store's clock is {skew:+.1f} s from this host's",
        "" if status == "ok" else "ntp",
    )


def _exclusive(store: Store) -> Check:
    if enforces_create(store):
        return Check("create-if-absent", "ok", "enforced: two publishers cannot commit one version")
    return Check(
        "create-if-absent",
        "warn",
        "not enforced: a second publisher is detected at its commit, not prevented",
        "start one publisher at a time on this root",
    )


def _record(channel: Channel) -> Check:
    try:
        return Check("channel", "ok", f"channel {channel.channel_id}")
    except (ChannelEmpty, Corrupt) as error:
        what = "channel.json is gone" if isinstance(error, ChannelEmpty) else str(error)
        ids = "its channel_id is in every manifest: put {format, channel_id, created} into channel.json"
        return Check("channel", "bad", f"{what}; nothing can be published", ids)


def _versions(channel: Channel) -> Iterator[Check]:
    committed, live = channel.committed(), channel.versions()
    if committed:
        yield _record(channel)
    replaced = replaced_manifests(channel.store)
    broken = [f"{version}: {problem}" for version, problem in replaced.items()]
    for version in committed:
        try:
            channel.manifest(version)
        except Corrupt as error:
            broken.append(f"{version}: {error}")
    if broken:
        remedy = copied_again(channel.store) or "never loaded; torn, or of a newer ckptsync: keep them"
        yield Check("versions", "bad", "; ".join(broken[:3]), remedy)
    elif not committed:
        yield Check("versions", "warn", "nothing was published here yet", "ckptsync publish, or check the root")
    else:
        left = len(committed) - len(live)
        yield Check(
            "versions",
            "ok",
            f"{len(committed)} complete, newest live {live[-1] if live else 'none'}, {left} dead",
        )


def _files(channel: Channel) -> Iterator[Check]:
    """Are the files of the newest version there, and of what it is made from? Silent if they are."""
    if problem := newest_missing(channel):
        mend = f"`ckptsync fsck {channel.store.url} --repair` goes on from the newest that can be read, if one can"
        detail = f"{channel.newest}, the newest, cannot be read whole: {problem}"
        yield Check("files", "bad", detail, copied_again(channel.store) or mend)


class _AdapterConfig(msgspec.Struct):
    r: int
    target_modules: list[str]


def _adapters(channel: Channel) -> Iterator[Check]:
    """What engines must be started with to follow LoRA adapters; silent for a channel of full versions."""
    newest = channel.poll()
    if newest is None or (manifest := channel.manifest(newest)).kind != "adapter":
        return
    try:
        data = read_bytes(channel.store, f"{manifest.folder}/{ADAPTER_CONFIG}", 1 << 20)
        config = msgspec.json.decode(data, type=_AdapterConfig)
    except (NotFound, msgspec.DecodeError) as error:
        yield Check("adapters", "bad", f"{newest}: {ADAPTER_CONFIG}: {error}", "publish it again")
        return
    yield Check(
        "adapters",
        "ok",
        f"{newest} is a LoRA adapter of rank {config.r} on {', '.join(config.target_modules)}",
        f"start engines with --enable-lora, --max-lora-rank >= {config.r} and --max-loras (SGLang: "
        "--max-loaded-loras) >= the watcher's staleness + 2, 3 by default: with less an adapter in use is dropped "
        "without a word",
    )


def _debris(channel: Channel) -> Iterator[Check]:
    if left := leftovers(channel):
        yield Check(
            "debris",
            "warn",
            f"{counted(len(left), 'unfinished attempt')}, {human_bytes(sum(left.values()))}",
            "a publish or a mirror runs, or died; swept by the next one, or by gc, once nobody wrote to it for an hour",
            tuple(sorted(left)),
        )
    else:
        yield Check("debris", "ok", "no unfinished attempts")


def _stage(channel: Channel, folder: str) -> Iterator[Check]:
    existing = folder
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    free = os.statvfs(existing).f_bavail * os.statvfs(existing).f_frsize
    try:
        needed = 3 * channel.latest().nbytes
    except (ChannelEmpty, Corrupt):
        needed = 0
    detail = f"{folder} has {human_bytes(free)} free; three versions need {human_bytes(needed)}"
    yield Check("stage", "ok" if free >= needed else "warn", detail, "" if free >= needed else "use --stage elsewhere")
