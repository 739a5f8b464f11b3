"""Settings of the trainer side: frozen values, checked where they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from . import digest
from .arguments import check, check_positive
from .delta.policy import DeltaPolicy
from .errors import InvalidInput, UnsupportedFormat
from .remap import Remap, check_tracks, rules_of
from .retention import Retention
from .settings import Setting, Settings, nearest, variable
from .signing import STRONG, Signer, Trust
from .version import VersionId, parse_label

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
    """The version this trainer goes on from, or its label. Numbers go on from it, and readers leave everything later
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

    delta: DeltaPolicy | None = None
    """Publish what changed since the version before, and a full version now and then. None: every version is full."""

    require_change: bool = False
    """Refuse (Unchanged) a version whose weights equal the one's before though the step moved. By default it is
    published and reported."""

    digest: str = digest.DEFAULT
    """Digest algorithm: `xxh3-128`, or `blake3`, which it always is with a `sign_key`."""

    sign_key: str | Signer | None = field(default=None, repr=False)
    """Sign every version with this Ed25519 key: a PEM file, or the PEM text itself. Only rank 0 reads it."""

    require_signature: str | Trust | None = None
    """Go on only from a version that one of these public keys signed, a PEM file or its text. With a `sign_key` and
    without `resumed_from` it is that key, unless others are named here."""

    bucket_bytes: int = 64 << 20
    """The ranks agree that all is well once per so many bytes, before they gather them together."""

    timeout: float = 1800.0
    """How long a rank waits for the others, in seconds. A dead rank is noticed at once; this bounds a slow
    one, so it must be longer than the slowest write of one shard."""

    sweep_after: float | None = 3600.0
    """Seconds after which what dead attempts left half written is deleted, once, when this publisher starts. None:
    never. A committed version is never touched."""

    retention: Retention | None = None
    """Which versions to keep. The others are deleted by a thread on rank 0 after a version is committed, never when
    this publisher starts. None: all stay."""

    max_lag: int | None = None
    """Back-pressure: before a version is begun, wait until no live reader that follows the newest lacks more versions
    than this. None: never, and no reader can slow a trainer down."""

    max_lag_seconds: float = 300.0
    """How long to wait for slow readers; then one warning names them, and the version is published. 0: only warn. Less
    than `timeout`, since the other ranks wait too."""

    def __post_init__(self) -> None:
        if self.sign_key is not None:
            object.__setattr__(self, "digest", STRONG)
        if self.resumed_from is not None:
            object.__setattr__(self, "resumed_from", _version(self.resumed_from))
        check_positive("shard_bytes", self.shard_bytes)
        check_positive("bucket_bytes", self.bucket_bytes)
        check_positive("timeout", self.timeout)
        if self.sweep_after is not None:
            check_positive("sweep_after", self.sweep_after)
        check_positive("exit_seconds", self.exit_seconds)
        self._check_one_of("writers", self.writers, ("rank0", "node", "all"))
        self._check_one_of("pending", self.pending, ("wait", "skip", "error"))
        if self.delta is not None and not isinstance(self.delta, DeltaPolicy):
            raise InvalidInput(f"delta={self.delta!r}: use ckptsync.DeltaPolicy(), or None")
        if self.retention is not None and not isinstance(self.retention, Retention):
            raise InvalidInput(f"retention={self.retention!r}: use ckptsync.Retention(keep_last=...), or None")
        if self.max_lag is not None:
            check_positive("max_lag", self.max_lag)
        if not self.max_lag_seconds >= 0 or (self.max_lag is not None and self.max_lag_seconds >= self.timeout):
            raise InvalidInput(f"max_lag_seconds={self.max_lag_seconds!r}: must be 0 or more, and less than timeout")
        rules_of(self.remove, self.remap)
        check_tracks(self.track_prefix)
        for name in ("param_prefix", "run_id"):
            if not isinstance(getattr(self, name), str):
                raise InvalidInput(f"{name}={getattr(self, name)!r}: must be a string")
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

    @classmethod
    def load(cls, file: str = "", **overrides: Any) -> PublisherConfig:
        """`overrides`, before the environment's CKPTSYNC_PUBLISHER_*, before the table [publisher] of `file` (or of
        the file that CKPTSYNC_CONFIG names, or of `ckptsync.toml` in the working folder).

            publisher = Publisher(root, config=PublisherConfig.load(dtype=torch.bfloat16))

        `retention` and `delta` are tables of their own there: [publisher.retention]. What is not plain data, such as
        `transform`, is given here. InvalidInput, naming the nearest, for a key that does not exist. Reads the file of
        each rank's own host: give all ranks the same one.
        """
        settings = Settings.read(file)
        settings.check_section(PUBLISHER, PUBLISHER_VARIABLES, PUBLISHER_ELSEWHERE)
        settings.check_environment(PUBLISHER_VARIABLES.values())
        found = settings.of(PUBLISHER, PUBLISHER_VARIABLES, shared=False)
        plain = {key: _plain(key, setting) for key, setting in found.items() if key not in overrides}
        return with_overrides(cls(), {**plain, **overrides})


def _version(given: Any) -> VersionId:
    found = parse_label(given) if isinstance(given, str) else given
    check("resumed_from", given, isinstance(found, VersionId), "give a version such as resume(...).version or 'e1-v42'")
    return cast(VersionId, found)


PUBLISHER = "publisher"

_PLAIN: dict[str, Any] = {
    "run_id": str, "dtype": str, "shard_bytes": int, "ties": str, "param_prefix": str, "writers": str, "pending": str,
    "exit_seconds": float, "require_change": bool, "digest": str, "bucket_bytes": int, "timeout": float,
    "sweep_after": float, "max_lag": int, "max_lag_seconds": float, "delta": DeltaPolicy, "retention": Retention,
    "sign_key": str, "require_signature": str,
}  # fmt: skip
"""What a file can say of a PublisherConfig."""

PUBLISHER_VARIABLES = {key: variable(f"publisher_{key}") for key in _PLAIN}

PUBLISHER_ELSEWHERE = {
    **{each.name: "is for the code that makes the Publisher to say" for each in dataclasses.fields(PublisherConfig)},
    **{each.name: f"belongs into [{PUBLISHER}.{table}]" for table, kind in _PLAIN.items()
       if dataclasses.is_dataclass(kind) for each in dataclasses.fields(kind)},
}  # fmt: skip
"""What else a file might say of it: by key, where that is said."""


def _plain(key: str, setting: Setting) -> Any:
    kind, value = _PLAIN[key], setting.value
    try:
        if dataclasses.is_dataclass(kind) and isinstance(value, dict):
            names = [each.name for each in dataclasses.fields(kind)]
            Settings(path=setting.origin, tables={key: value}).check_section(key, names, {})
        found = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{key} = {value!r} of {setting.origin}: {error}") from error
    return _dtype(found, setting) if key == "dtype" else found


def _dtype(name: str, setting: Setting) -> torch.dtype:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidInput(f"dtype = {name!r} of {setting.origin}: no dtype of torch, such as 'bfloat16'")
    return found


def with_overrides(config: PublisherConfig, overrides: Mapping[str, Any]) -> PublisherConfig:
    """The config with some fields replaced. InvalidInput for a value that cannot be, or a field that does not exist,
    naming the nearest."""
    if unknown := overrides.keys() - {each.name for each in dataclasses.fields(config)}:
        raise _unknown_setting(min(unknown))
    try:
        return dataclasses.replace(config, **overrides)
    except TypeError as error:
        raise InvalidInput(f"a setting of Publisher is of another type: {error}") from None


def _unknown_setting(name: str) -> InvalidInput:
    fields = [each.name for each in dataclasses.fields(PublisherConfig)]
    known = {field: repr(field) for field in fields}
    for setting, kind in (("retention", Retention), ("delta", DeltaPolicy)):
        for each in dataclasses.fields(kind):
            known.setdefault(each.name, f"{setting}=ckptsync.{kind.__name__}({each.name}=...)")
    near = nearest(name, list(known))
    said = f"{known[near]} is the nearest" if near else f"known are {', '.join(fields)}"
    return InvalidInput(f"setting {name!r} of Publisher is not known: {said}")
