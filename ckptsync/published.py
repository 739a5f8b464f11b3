"""What a publish returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from .manifest import Kind, Manifest
from .version import VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one publish did; equal on every rank."""

    version: VersionId
    kind: Kind
    """`full` (every tensor), `delta` (what changed; with a DeltaPolicy, where that is worth it) or `adapter`."""

    nbytes: int
    """Bytes of the whole version, as an engine loads it."""

    stored_bytes: int
    """Bytes of the files that were written for it: of a delta what changed alone. Trainer state is not counted."""

    seconds: dict[str, float]
    """Rank 0's time by phase: `gather` (waiting for tensors), `write` (digest and storage), `commit`; with a
    DeltaPolicy also `encode` (what changed), in the background also `snapshot`, which is what the training waited
    for."""

    changed: bool
    """False if the content equals the version's before: weights that were meant to change have not."""

    content_digest: str
    manifest: Manifest = field(repr=False)
    """The commit record, with every tensor: kept out of `repr`, which ends up in trainers' logs."""

    @classmethod
    def of(cls, manifest: Manifest, seconds: dict[str, float], *, changed: bool) -> Published:
        return cls(
            version=manifest.id,
            kind=manifest.kind,
            nbytes=manifest.nbytes,
            stored_bytes=manifest.stored_bytes,
            seconds=seconds,
            changed=changed,
            content_digest=manifest.content_digest,
            manifest=manifest,
        )
