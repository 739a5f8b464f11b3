"""What the gloo transport and its receiver say to each other over HTTP. The tensors go over gloo, in between.

POST /receive/join    Join     both sides enter a group of their own: the trainer's rank 0 and every engine
POST /receive/start   Start    answers Started; refused here, nothing was touched
POST /receive/bucket  Names    then the sender broadcasts these tensors, in this order
POST /receive/finish  Finish   answers Finished: all of it is in, read back, and has the label
"""

from __future__ import annotations

import msgspec

from ..manifest import Kind, TensorEntry, TensorSpec, Track, combined_content
from ..version import VersionId


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the group meets: a TCPStore at `host:port`, kept by the sender, which is rank 0 of `size`."""

    host: str
    port: int
    rank: int
    size: int
    seconds: float
    """How long a broadcast may take."""


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is about to be sent."""

    version: VersionId
    specs: dict[str, list[TensorSpec]]
    """By track."""

    ties: dict[str, dict[str, str]]
    kind: Kind = "full"
    digest: str = ""
    """The content digest, if the sender knows it already: from an attempt before."""

    allow_older: bool = False


class Started(msgspec.Struct, frozen=True):
    """`held`: content digest of this very version, which the receiver holds already; else empty, and it waits."""

    held: str


class Names(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bucket."""

    track: str
    names: list[str]


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of the data, with the label in the same call."""

    label: str
    digest: str
    """Content digest of what was sent."""


class Finished(msgspec.Struct, frozen=True):
    """What the receiver says that it holds, from its own memory."""

    label: str
    digest: str


def content_of(
    specs: dict[str, list[TensorSpec]], ties: dict[str, dict[str, str]], digests: dict[str, dict[str, str]]
) -> str:
    """The content digest of a version, from each tensor's: equal to its manifest's, if it has files too."""
    tracks = {}
    for track, listed in specs.items():
        known = {spec.name: spec for spec in listed}
        names = {spec.name: spec.name for spec in listed} | ties.get(track, {})
        tracks[track] = Track(
            files=(),
            tensors=tuple(
                TensorEntry(
                    name=name, dtype=known[first].dtype, shape=known[first].shape, digest=digests[track][first], file=""
                )
                for name, first in names.items()
            ),
        )  # fmt: skip
    return combined_content(tracks)
