"""Every error that ckptsync raises on purpose, grouped by what the handler would do.

CkptSyncError
├── InvalidInput (ValueError)        fix the call or the configuration, then call again
│   ├── InvalidName                  a file, tensor or version name that may not be used
│   ├── DuplicateName                two tensors or files claim one name
│   ├── UnsupportedTensor            a dtype, layout or device that cannot be published
│   ├── Unchanged                    the weights are those of the version before, and were to change
│   └── Busy                         a background publish is pending still
├── NotFound (LookupError)           the thing asked for is not there
│   ├── VersionNotFound              no complete version of that identity
│   ├── VersionGone                  it was there, and was collected in the meantime
│   └── ChannelEmpty                 nothing was ever published here
├── Conflict                         somebody else owns the name
│   ├── AlreadyExists                create-if-absent found another's file
│   ├── VersionExists                the identity is taken by other content
│   ├── Fenced                       a newer epoch exists: this trainer must stop publishing
│   ├── IsMirror                     the root is a copy of another: publish there
│   ├── NotAMirror                   a mirror's destination has versions of its own
│   └── OutOfOrder                   an engine holds a newer version than the one that is sent
├── Corrupt                          bytes are not what the manifest says
│   ├── BadManifest                  does not parse, or does not validate
│   ├── BadShard                     a shard's size, header or digest is wrong
│   ├── BrokenChain                  a delta version of which a link is missing or damaged
│   ├── Unrepairable                 no version is left to repair the channel from
│   ├── Untrusted                    not signed by a key that is trusted
│   └── UnsupportedFormat            written by a newer ckptsync
├── StoreError (OSError)             the storage said no
│   ├── StoreUnavailable             transient: timeouts, connection lost, ESTALE; retried, then raised
│   ├── StoreFull                    ENOSPC, EDQUOT, EFBIG
│   └── StoreDenied                  EACCES, EPERM, EROFS, 401, 403
├── RankError                        a rank of the trainer failed; the same error on every rank
│   ├── RankFailed                   with the rank's own message
│   ├── RanksDisagree                ranks walk different tensors or settings
│   └── RankTimeout                  a rank did not come within the deadline
├── TransportError                   a way to bring weights to engines
│   ├── TransportUnavailable         it cannot be used now; no engine was touched
│   ├── TransportFailed              it broke off, and engines may hold a mix
│   └── NoTransport                  no way is left; the same error on every rank
└── EngineError                      the inference engine
    ├── EngineUnavailable            no answer; nothing was touched
    ├── EngineRefused                it said no before the weights were touched
    ├── EngineDirty                  failed after the weights were touched: old and new may be mixed
    ├── SchemaMismatch               this version does not fit this engine; refused before the pause
    ├── ProofUnavailable             the proof asked for cannot be had here; refused before the pause
    └── ProofFailed                  what the engine holds is not what was to be loaded

`kind` is a stable string for logs, receipts and scripts.
"""

from __future__ import annotations

import re

__all__ = [
    "AlreadyExists", "BadManifest", "BadShard", "BrokenChain", "Busy", "ChannelEmpty", "CkptSyncError",
    "Conflict", "Corrupt", "DuplicateName", "EngineDirty", "EngineError", "EngineRefused", "EngineUnavailable",
    "Fenced", "InvalidInput", "InvalidName", "IsMirror", "NoTransport", "NotAMirror", "NotFound", "OutOfOrder",
    "ProofFailed", "ProofUnavailable", "RankError", "RankFailed", "RankTimeout", "RanksDisagree",
    "SchemaMismatch", "StoreDenied", "StoreError", "StoreFull", "StoreUnavailable", "TransportError",
    "TransportFailed", "TransportUnavailable", "Unchanged", "Unrepairable", "UnsupportedFormat", "UnsupportedTensor",
    "Untrusted", "VersionExists", "VersionGone", "VersionNotFound",
]  # fmt: skip


class CkptSyncError(Exception):
    """Base of all errors raised on purpose. The message names the thing and the remedy."""

    kind = "error"

    def __init_subclass__(cls) -> None:
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


class InvalidInput(CkptSyncError, ValueError):
    """The call or the configuration is wrong; nothing was written."""


class InvalidName(InvalidInput):
    """A name that would be unsafe or ambiguous on storage."""


class DuplicateName(InvalidInput):
    """Two tensors or files claim one name; the message names both."""


class UnsupportedTensor(InvalidInput):
    """A tensor that the safetensors format or this exporter cannot carry."""


class Unchanged(InvalidInput):
    """`require_change`: the weights equal the previous version's, though they were to change. Nothing was published."""


class Busy(InvalidInput):
    """A background publish is pending still, so this one was refused or skipped. Nothing was written."""


class NotFound(CkptSyncError, LookupError):
    """The thing asked for is not there."""


class VersionNotFound(NotFound):
    """No complete version of that identity exists in the channel."""


class VersionGone(NotFound):
    """The version was complete and has been collected since."""


class ChannelEmpty(NotFound):
    """The channel has no complete version yet."""


class Conflict(CkptSyncError):
    """Somebody else owns the name."""


class AlreadyExists(Conflict):
    """Create-if-absent found a file. Who wrote it is for the caller to find out (read back the nonce)."""


class VersionExists(Conflict):
    """The version's identity is taken by other content. Published versions are immutable."""


class Fenced(Conflict):
    """A newer epoch was claimed: this publisher is the older attempt and must stop."""


class IsMirror(Conflict):
    """The root is kept by `ckptsync mirror` as a copy of another one: only that one is published to."""


class NotAMirror(Conflict):
    """What is at a mirror's destination did not come from its source: nothing is written there."""


class OutOfOrder(Conflict):
    """The engine holds a newer version than the one that is sent. Going back is to be asked for."""


class Corrupt(CkptSyncError):
    """Bytes on storage are not what their manifest says."""


class BadManifest(Corrupt):
    """A manifest that does not parse or validate. The version counts as incomplete."""


class BadShard(Corrupt):
    """A shard whose size, header or digest is not the manifest's."""


class BrokenChain(Corrupt):
    """A delta version that cannot be rebuilt: what it was taken against is not there, or is not what it was."""


class Unrepairable(Corrupt):
    """No live version of the channel can be read: what repairs it has to come from elsewhere."""


class Untrusted(Corrupt):
    """No signature by a trusted key, or one over something else. To a reader that wants one, it is not a version."""


class UnsupportedFormat(Corrupt):
    """Written in a format that this release does not know."""


class StoreError(CkptSyncError, OSError):
    """The storage failed. `__cause__` is the store's own error."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else self.kind


class StoreUnavailable(StoreError):
    """Transient: no answer, connection lost, stale handle, throttled. Retried within bounds, then raised."""


class StoreFull(StoreError):
    """No space left, or the quota is used up."""


class StoreDenied(StoreError):
    """Permission denied, read-only, or wrong credentials."""


class RankError(CkptSyncError):
    """A collective publish failed; every rank raises the same error."""


class RankFailed(RankError):
    """One rank failed; the message carries its number and its own words."""


class RanksDisagree(RankError):
    """Ranks would walk different tensors, or were given different settings."""


class RankTimeout(RankError):
    """A rank did not come to the collective within its deadline, or died."""


class TransportError(CkptSyncError):
    """A way to bring weights to engines."""


class TransportUnavailable(TransportError):
    """It cannot be used now, and no engine was touched. May pass."""


class TransportFailed(TransportError):
    """It broke off after engines were touched: they stay paused until a complete version is in."""


class NoTransport(TransportError):
    """No way was left to bring the version to every engine. The message has each one's reason."""


class EngineError(CkptSyncError):
    """The inference engine."""

    silent = ""
    """Address of the engine, where it let the time for an answer pass: to ask it again would take as long again. Empty
    where it answered, or refused the connection."""


class EngineUnavailable(EngineError):
    """The engine does not answer. Nothing was touched."""


class EngineRefused(EngineError):
    """The engine said no before its weights were touched."""


class EngineDirty(EngineError):
    """The engine failed after its weights were touched. It must not serve before a complete, proven load."""


class SchemaMismatch(EngineError):
    """The version's tensors do not fit the engine. Refused before the pause; serving goes on."""


class ProofUnavailable(EngineError):
    """This engine, or this version, cannot be proven to the level that was asked for. Refused before the pause."""


class ProofFailed(EngineError):
    """What the engine holds or reports is not what was to be loaded."""
