"""What there is to see when the faults are over: channels, engines, receipts and what the trainers were told."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ckptsync.channel import Channel
from ckptsync.cli.engines import connect
from ckptsync.errors import CkptSyncError
from ckptsync.fsck import fsck
from ckptsync.store import open_store
from ckptsync.verify import verify_version
from ckptsync.version import VersionId

from . import record
from .record import Attempt, End, Holding, Publish, Report
from .victims import Victim
from .witness import Replica
from .world import World


class Listing:
    """Notes every version that is ever committed at the mirror, since it keeps the newest only."""

    def __init__(self, world: World) -> None:
        self.seen: set[str] = set()
        self._channel = Channel.open(world.copy)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Listing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            self.seen.update(version.label for version in self._channel.committed())


def into(report: Report, world: World, began: float, seen: set[str]) -> None:
    """Fill in all that is known at the end, but for which model it is that an engine sounds like."""
    store = open_store(world.root, options=world.server.options)
    report.source = holding(Channel.open(store), began, set())
    report.mirror = holding(Channel.open(world.copy), began, seen)
    report.publishes += publishes(world, began)
    names = {replica.url: replica.name for replica in world.replicas}
    report.attempts = [attempt for watcher in world.watchers for attempt in attempts(watcher, began, names)]
    report.ends = [end(replica) for replica in world.replicas]
    report.ended = [each.name for each in world.processes if each.ended_by_itself or each.ended() is not None]


def holding(channel: Channel, began: float, seen: set[str]) -> Holding:
    committed, live = channel.committed(), channel.versions()
    findings = [f"{finding.version}: {finding.message}" for finding in fsck(channel)]
    for version in committed:
        findings += [f"{version}: {each.file}: {each.message}" for each in verify_version(channel, version).problems]
    return Holding(
        newest=live[-1].label if live else "",
        versions=[_version(channel, version, began) for version in committed],
        epochs=list(_epochs(channel)),
        findings=findings,
        seen=sorted(seen | {version.label for version in committed}),
    )


def _version(channel: Channel, version: VersionId, began: float) -> record.Version:
    manifest = channel.manifest(version)
    return record.Version(
        label=version.label, at=manifest.created - began, model=manifest.metadata["model"], kind=manifest.kind,
        content=manifest.content_digest, record=hashlib.sha256(manifest.encoded).hexdigest(),
    )  # fmt: skip


def _epochs(channel: Channel) -> Iterator[record.Epoch]:
    for number, claim in sorted(channel.claims().items()):
        if claim is not None:
            yield record.Epoch(number, claim.next_number, claim.resumed_from.label if claim.resumed_from else "")


def publishes(world: World, began: float) -> list[Publish]:
    return [
        msgspec.structs.replace(told, at=told.at - began)
        for told in (msgspec.convert(line, Publish) for line in _lines(world.publishes))
    ]


def attempts(watcher: Victim, began: float, names: Mapping[str, str]) -> Iterator[Attempt]:
    """`names`: URL -> engine."""
    for line in _lines(watcher.said):
        engine = names.get(line["engine"].partition("@")[2], line["engine"])
        yield Attempt(
            at=line["since"] - began, watcher=watcher.name, engine=engine, version=line["version"],
            state=line["state"], stage_seconds=line["stage_seconds"], pause_seconds=line["pause_seconds"],
            error=(line["error"] or {}).get("kind", ""),
        )  # fmt: skip


def _lines(path: str) -> Iterator[dict[str, Any]]:
    """The JSON documents in a file, but for one that a killed process had begun to write."""
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    yield msgspec.json.decode(line)
                except msgspec.DecodeError:
                    continue
    except FileNotFoundError:
        return


def end(replica: Replica) -> End:
    """An engine that does not answer has neither label nor voice."""
    engine = connect(replica.engine, replica.url)
    try:
        status = engine.status()
    except CkptSyncError as error:
        return End(replica.name, replica.channel, "", False, str(error))
    finally:
        engine.close()
    said = None if status.paused else replica.answer()
    return End(replica.name, replica.channel, status.label, status.paused, said.words if said is not None else "")


def understand(report: Report, replicas: Sequence[Replica]) -> None:
    """Put models in the place of the words that they say, once their voices are known; what none says stays."""
    voices = {replica.name: {words: model for model, words in replica.voices.items()} for replica in replicas}
    for told in (report.answers, report.ends):
        told[:] = [msgspec.structs.replace(each, said=voices[each.replica].get(each.said, each.said)) for each in told]
