"""How an HTTP adapter's engine shows what it holds: by a checksum of its own, or by its ranks, which read back."""

from __future__ import annotations

from typing import Protocol

from ckptsync.engine import ReadBack, StagedVersion
from ckptsync.engine_http import Touch
from watchers.live.receipts import RankReceipt


class ProofOptions(Protocol):
    """What of an adapter's options matters here."""

    @property
    def fingerprint(self) -> bool: ...

    @property
    def pause_timeout(self) -> float: ...

    def load_timeout(self, nbytes: int) -> float: ...


class ChecksumProof:
    """For an engine that may take a checksum of its weights."""

    options: ProofOptions

    def __init__(self) -> None:
        self._read_backs: dict[str, ReadBack] = {}

    def read_back(self) -> ReadBack:
        """Its checksum, where it takes one of all its weights; tried once per boot."""
        boot = self._boot_id()
        if boot not in self._read_backs:
            usable = self.options.fingerprint and self._checksum(self.options.pause_timeout, "no")
            self._read_backs = {boot: "checksum" if usable else "none"}
        return self._read_backs[boot]

    def _was_read_back(self) -> bool:
        return False

    def _fingerprint(self, version: StagedVersion) -> str:
        return self._checksum(self.options.load_timeout(version.manifest.nbytes), "done")

    def _boot_id(self) -> str:
        raise NotImplementedError

    def _checksum(self, seconds: float, touch: Touch) -> str:
        """Empty where the engine takes none."""
        raise NotImplementedError


class RankProof(ChecksumProof):
    """For an engine with the plugin, before the stock adapter among the bases: each rank says whether it read back."""

    receipts: list[RankReceipt] = []  # noqa: RUF012 - replaced, never changed
    """Of the last update: which way each rank loaded, and how it proved it."""

    _boot = ""
    _checksums = False

    def read_back(self) -> ReadBack:
        """By the workers, until one of them says that it could not."""
        return super().read_back() if self._checksums else "values"

    def _was_read_back(self) -> bool:
        return bool(self.receipts) and all(receipt.proof != "none" for receipt in self.receipts)

    def _fingerprint(self, version: StagedVersion) -> str:
        """Where the values were not read back, the engine's own checksum; always, once it was needed: one engine's
        fingerprints are compared with each other."""
        if any(receipt.proof == "none" for receipt in self.receipts):
            self._checksums = True
        return super()._fingerprint(version) if self._checksums else ""

    def _remember(self, boot: str) -> None:
        """A restarted engine begins anew."""
        if boot != self._boot:
            self._boot, self._checksums = boot, False
