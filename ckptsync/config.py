"""Settings of the trainer side: frozen values, checked where they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from . import digest
from .errors import InvalidInput, UnsupportedFormat
from .version import VersionId

if TYPE_CHECKING:
    import torch

Ties = Literal["omit", "duplicate"]


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

    digest: str = digest.DEFAULT
    """Digest algorithm: `xxh3-128`, or `blake3` where manifests are signed."""

    bucket_bytes: int = 64 << 20
    """The ranks agree that all is well once per so many bytes, before they gather them together."""

    timeout: float = 1800.0
    """How long a rank waits for the others, in seconds. A dead rank is noticed at once; this bounds a slow
    one, so it must be longer than the slowest write of one shard."""

    def __post_init__(self) -> None:
        self._check_positive("shard_bytes", self.shard_bytes)
        self._check_positive("bucket_bytes", self.bucket_bytes)
        self._check_positive("timeout", self.timeout)
        if self.ties not in ("omit", "duplicate"):
            raise InvalidInput(f"ties={self.ties!r}: use 'omit' or 'duplicate'")
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise InvalidInput(f"dtype={self.dtype!r}: use a floating torch dtype such as torch.bfloat16, or None")
        try:
            digest.hasher(self.digest)
        except UnsupportedFormat as error:
            raise InvalidInput(f"digest={self.digest!r}: {error}") from None

    def _check_positive(self, field: str, value: float) -> None:
        if isinstance(value, bool) or not value > 0:
            raise InvalidInput(f"{field}={value!r}: must be greater than 0")
