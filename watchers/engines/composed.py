"""Several modules of this process that serve together, as one engine: an actor and its draft, say.

A version has a track for each of them. They are paused together, nothing is touched unless every track fits its module,
and the label comes when all of them hold their part: no answer is ever computed by two versions.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

import msgspec
from torch import nn

from ckptsync.digest import digest, sha256
from ckptsync.engine import Confirmation, EngineStatus, StagedVersion, Versioned
from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable, InvalidInput, ProofFailed
from ckptsync.manifest import MAIN_TRACK, Manifest
from ckptsync.shards.tensors import map_tensors, tensor_bytes
from ckptsync.transports.targets import Targets

from .module import PAUSE_SECONDS, Gate


class ComposedEngine(Versioned):
    """`modules`: track -> module, dense and whole in this process. Whoever computes with any of them does so inside
    `with engine.gate:`. Dtypes must be the version's. Takes versions from files (by a watcher) and from transports."""

    def __init__(
        self, modules: Mapping[str, nn.Module], *, name: str = "composed", pause_seconds: float = PAUSE_SECONDS
    ) -> None:
        if not modules:
            raise InvalidInput("a composed engine needs at least one module")
        self.modules, self.name, self.gate = dict(modules), name, Gate()
        self._pause_seconds, self._boot_id = pause_seconds, uuid.uuid4().hex
        self._label = ""
        self._targets: Targets | None = None

    def begin(self) -> None:
        """From here on it may hold a mix: it has no label."""
        self._label = ""

    def hold(self, label: str) -> None:
        """Every module holds its part of this version."""
        self._label = label

    def status(self) -> EngineStatus:
        return EngineStatus(label=self._label, boot_id=self._boot_id, paused=self.gate.is_shut)

    def schema(self) -> None:
        """None: names of different tracks may be the same. `start` looks at each track."""

    def pause(self) -> None:
        if not self.gate.shut(self._pause_seconds):
            raise EngineUnavailable(f"{self.name}: still computing after {self._pause_seconds} s; not paused")

    def start(self, version: StagedVersion) -> None:
        """SchemaMismatch, naming the track, or EngineRefused: every module is as it was."""
        if version.manifest.kind != "full":
            raise EngineRefused(f"{self.name}: loads full versions, {version.label} is kind {version.manifest.kind}")
        if not self.gate.is_shut:
            raise EngineRefused(f"{self.name}: is not paused")
        self._targets = _targets(self, version.manifest)

    def update(self, version: StagedVersion) -> None:
        """Copy into every module. EngineDirty for all of them if one breaks off."""
        if self._targets is None:
            raise EngineRefused(f"{self.name}: {version.label} was not started")
        self.begin()
        try:
            for track, content in version.manifest.tracks.items():
                given = {entry.name for entry in content.tensors if not entry.alias_of}
                tensors = map_tensors(_folder(version, track), content)
                self._targets.copy(track, ((name, tensor) for name, tensor in tensors if name in given))
        except Exception as error:
            raise EngineDirty(f"{self.name}: {version.label} is half loaded: {error}") from error
        self._targets.check_complete()

    def finish(self, version: StagedVersion) -> None:
        self._label = version.label

    def confirm(self, version: StagedVersion) -> Confirmation:
        """Every live tensor against the manifest. ProofFailed names the first that differs, and its track."""
        if self._label != version.label:
            raise ProofFailed(f"{self.name}: holds {self._label or 'no version'!r}, not {version.label}")
        targets, rows = _targets(self, version.manifest), []
        for track, content in sorted(version.manifest.tracks.items()):
            expected = {entry.name: entry.digest for entry in content.tensors}
            for name, tensor in targets.live(track):
                found = digest(tensor_bytes(tensor), version.manifest.digest)
                if found != expected[name]:
                    raise ProofFailed(f"{self.name}: {name} of track {track} is not the one of {version.label}")
                rows.append((track, name, found))
        return Confirmation(label=self._label, fingerprint=sha256(msgspec.json.encode(rows)), read_back=True)

    def resume(self) -> None:
        self.gate.open()

    def close(self) -> None:
        self.gate.open()


def _targets(engine: ComposedEngine, manifest: Manifest) -> Targets:
    specs = {
        track: [entry.spec for entry in content.tensors if not entry.alias_of]
        for track, content in manifest.tracks.items()
    }
    ties = {
        track: {entry.name: entry.alias_of for entry in content.tensors if entry.alias_of}
        for track, content in manifest.tracks.items()
    }
    return Targets(engine.modules, specs, ties, name=engine.name)


def _folder(version: StagedVersion, track: str) -> str:
    return version.folder if track == MAIN_TRACK else os.path.join(version.folder, track)
