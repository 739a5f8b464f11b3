"""Questions to a root, answered by trying: can this storage carry a channel, and is the channel on it healthy?"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator

import msgspec

from .channel import Channel
from .errors import ChannelEmpty, CkptSyncError, Corrupt, NotFound, StoreDenied
from .layout import ADAPTER_CONFIG, DATA
from .store.base import Store, put_bytes, read_bytes
from .store.probe import enforces_create
from .version import parse_stem

SAMPLE = 32 << 20


class Check(msgspec.Struct, frozen=True):
    """One answer. `status` is ok, warn or bad; `remedy` says what to do about the latter two."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def examine(channel: Channel, stage: str) -> Iterator[Check]:
    """Run every check, in order; the first that the store refuses ends the run. Leaves nothing behind."""
    store = channel.store
    steps: list[Callable[[], Iterator[Check]]] = [
        lambda: _reading(store),
        lambda: _writing(store),
        lambda: _exclusive(store),
        lambda: _versions(channel),
        lambda: _adapters(channel),
        lambda: _debris(channel),
        lambda: _stage(channel, stage),
    ]
    for step in steps:
        try:
            yield from step()
        except StoreDenied as error:
            yield Check("writing", "warn", str(error), "reading works, so watchers can run; publishing cannot")
        except CkptSyncError as error:
            yield Check("store", "bad", f"{error.kind}: {error}", "check the root, the network and the credentials")
            return


def _reading(store: Store) -> Iterator[Check]:
    start = time.perf_counter()
    sum(1 for _ in store.list("manifests"))
    yield Check("listing", "ok", f"{store.url} answers in {(time.perf_counter() - start) * 1000:.0f} ms")


def _writing(store: Store) -> Iterator[Check]:
    path = f"doctor/{uuid.uuid4().hex}"
    data = os.urandom(1 << 20) * (SAMPLE >> 20)
    try:
        start = time.perf_counter()
        put_bytes(store, path, data)
        written = time.perf_counter()
        entries = [entry for entry in store.list("doctor") if entry.path == path]
        same = read_bytes(store, path, SAMPLE) == data
        yield _rates(start, written, time.perf_counter())
        yield _visible(bool(entries), same)
        if entries:
            yield _clock(entries[0].modified)
    finally:
        store.delete(path)


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


def _exclusive(store: Store) -> Iterator[Check]:
    if enforces_create(store):
        yield Check("create-if-absent", "ok", "enforced: two publishers cannot commit one version")
        return
    yield Check(
        "create-if-absent",
        "warn",
        "not enforced: a second publisher is detected at its commit, not prevented",
        "start one publisher at a time on this root",
    )


def _record(channel: Channel) -> Check:
    try:
        return Check("channel", "ok", f"channel {channel.channel_id}")
    except (ChannelEmpty, Corrupt) as error:
        ids = "its channel_id is in every manifest: put {format, channel_id, created} into channel.json"
        return Check("channel", "bad", f"{error}; nothing can be published", ids)


def _versions(channel: Channel) -> Iterator[Check]:
    committed, live = channel.committed(), channel.versions()
    if committed:
        yield _record(channel)
    broken = []
    for version in committed:
        try:
            channel.manifest(version)
        except Corrupt as error:
            broken.append(f"{version}: {error}")
    if broken:
        yield Check("versions", "bad", "; ".join(broken[:3]), "never loaded; torn, or of a newer ckptsync: keep them")
    elif not committed:
        yield Check("versions", "warn", "nothing was published here yet", "ckptsync publish, or check the root")
    else:
        left = len(committed) - len(live)
        yield Check(
            "versions",
            "ok",
            f"{len(committed)} complete, newest live {live[-1] if live else 'none'}, {left} dead",
        )


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
    committed = {v.stem for v in channel.committed()}
    attempts: dict[str, int] = {}
    for entry in channel.store.list(DATA):
        stem, _, rest = entry.path.removeprefix(f"{DATA}/").partition("/")
        version = parse_stem("-".join(stem.split("-")[:2]))
        if rest and version is not None and version.stem not in committed:
            attempts[stem] = attempts.get(stem, 0) + entry.size
    if attempts:
        total = sum(attempts.values()) / 1e6
        yield Check(
            "debris",
            "warn",
            f"{len(attempts)} unfinished attempts, {total:.0f} MB",
            "a publish runs, or died",
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
    detail = f"{folder} has {free / 1e9:.1f} GB free; three versions need {needed / 1e9:.1f} GB"
    yield Check("stage", "ok" if free >= needed else "warn", detail, "" if free >= needed else "use --stage elsewhere")
