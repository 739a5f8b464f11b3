"""Settings of the trainer side: frozen values, checked where they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from . import digest
from .errors import InvalidInput, UnsupportedFormat
from .remap import Remap, check_tracks, rules_of
from .version import VersionId

if TYPE_CHECKING:
    import torch

Writers = Literal["rank0", "node", "all"]
Ties = Literal["omit", "duplicate"]
Pending = Literal["wait", "skip", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherConfig:
    """How a Publisher writes. Raises InvalidInput, naming the field, for a value that cannot be meant."""

    run_id: str = ""
    """Name of the training run, recorded in the claim and in every manifest. A fresh uuid by default."""

    resumed_from: VersionId | None = None
    """The version this trainer goes on from. Numbers go on from it, and readers leave everything later
    behind. By default the newest version of the channel."""

    dtype: torch.dtype | None = None
    """Dtype on the wire. Floating tensors that are wider are cast to it, before they are gathered; all others
    stay as they are. None: no cast."""

    shard_bytes: int = 4 << 30
    """A shard ends before the layer that would make it larger, in bytes. A tensor is never cut."""

    ties: Ties = "omit"
    """`omit`: tied weights are stored once and the manifest names the alias, as transformers does.
    `duplicate`: stored under both names, for engines that want each."""

    remap: Remap = ()
    """Names in the model -> names in the version: ordered rules with at most one `*` on each side, the first
    that matches decides, None drops the tensor. A rule that matches nothing is refused."""

    remove: Sequence[str] = ()
    """Names to leave out, each with at most one `*`. Go before `remap`."""

    param_prefix: str = ""
    """Put in front of every name, after `remap`."""

    track_prefix: Mapping[str, str] = field(default_factory=dict)
    """Track -> prefix: splits one model into tracks by the names so far; the prefix is taken off."""

    transform: Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]] | None = None
    """Makes of a whole tensor (CPU, dtype on the wire) what an engine wants, before `remap`: one expert after
    another of a stack, say. Called first with tensors on the meta device, to plan the files; where that fails,
    rank 0 writes the version as a stream. Ties are written twice."""

    expect: str | Iterable[str] | None = None
    """The names that the version must have, no more and no fewer: a Hugging Face folder, an index file, or names
    (of the track `model`, where there are several)."""

    writers: Writers = "rank0"
    """Who writes: `rank0`, one rank of each `node`, or `all`, in byte-balanced shares of whole layers. Every
    writer must reach the root. Iterators and WeightSources are written by rank 0 whatever this says."""

    pending: Pending = "wait"
    """What a background publish does while the one before is not complete: `wait` for it, `skip` itself, or raise
    `error` Busy."""

    exit_seconds: float = 20.0
    """How long interpreter exit and SIGTERM wait for a pending background version before they drop it."""

    require_change: bool = False
    """Refuse (Unchanged) a version whose weights equal the one's before though the step moved. By default it is
    published and reported."""

    digest: str = digest.DEFAULT
    """Digest algorithm: `xxh3-128`, or `blake3` where manifests are signed."""

    bucket_bytes: int = 64 << 20
    """The ranks agree that all is well once per so many bytes, before they gather them together."""

    timeout: float = 1800.0
    """How long a rank waits for the others, in seconds. A dead rank is noticed at once; this bounds a slow
    one, so it must be longer than the slowest write of one shard."""

    sweep_after: float | None = 3600.0
    """Seconds after which what dead attempts left half written is deleted, once, when this publisher starts. None:
    never. A committed version is never touched."""

    def __post_init__(self) -> None:
        self._check_positive("shard_bytes", self.shard_bytes)
        self._check_positive("bucket_bytes", self.bucket_bytes)
        self._check_positive("timeout", self.timeout)
        if self.sweep_after is not None:
            self._check_positive("sweep_after", self.sweep_after)
        self._check_positive("exit_seconds", self.exit_seconds)
        self._check_one_of("writers", self.writers, ("rank0", "node", "all"))
        self._check_one_of("pending", self.pending, ("wait", "skip", "error"))
        rules_of(self.remove, self.remap)
        check_tracks(self.track_prefix)
        if not isinstance(self.param_prefix, str):
            raise InvalidInput(f"param_prefix={self.param_prefix!r}: must be a string")
        if self.ties not in ("omit", "duplicate"):
            raise InvalidInput(f"ties={self.ties!r}: use 'omit' or 'duplicate'")
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise InvalidInput(f"dtype={self.dtype!r}: use a floating torch dtype such as torch.bfloat16, or None")
        try:
            digest.hasher(self.digest)
        except UnsupportedFormat as error:
            raise InvalidInput(f"digest={self.digest!r}: {error}") from None

    def _check_one_of(self, name: str, value: str, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            raise InvalidInput(f"{name}={value!r}: use one of {', '.join(map(repr, allowed))}")

    def _check_positive(self, field: str, value: float) -> None:
        if isinstance(value, bool) or not value > 0:
            raise InvalidInput(f"{field}={value!r}: must be greater than 0")


def with_overrides(config: PublisherConfig, overrides: Mapping[str, Any]) -> PublisherConfig:
    """The config with some fields replaced. InvalidInput for a field that does not exist, or a value that cannot be."""
    try:
        return dataclasses.replace(config, **overrides)
    except TypeError as error:
        raise InvalidInput(f"Publisher has no such setting: {error}") from None
