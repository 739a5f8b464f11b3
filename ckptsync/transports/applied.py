"""The receiver's ledger: what it holds, so that a repeated send is told from a new one."""

from __future__ import annotations

from ..errors import OutOfOrder, VersionExists
from ..version import VersionId


class Applied:
    """Identity and content digest of what a receiver was last sent, and whether it holds all of it.

    In memory, as the weights are: both are lost together.
    """

    def __init__(self) -> None:
        self._version: VersionId | None = None
        self._digest = ""
        self._whole = False

    @property
    def version(self) -> VersionId | None:
        """What it holds for certain; None while it may hold a mix."""
        return self._version if self._whole else None

    def check(self, version: VersionId, digest: str = "", *, allow_older: bool = False) -> str:
        """The content digest under which exactly this version is held already, a no-op then; else the empty string.

        OutOfOrder for a version older than the last one, unless `allow_older`. VersionExists for the one that is held
        with another digest; a sender that does not know its digest yet gives none, and compares the answer.
        """
        if self._version is not None and version < self._version and not allow_older:
            raise OutOfOrder(
                f"{version} is older than {self._version}, which this receiver was sent last: go on in the channel of "
                "that one, or ask for going back with WeightSync(allow_older=True)"
            )
        if version != self.version:
            return ""
        if digest and digest != self._digest:
            raise VersionExists(f"{version} is held with other content: a version keeps the content of its first send")
        return self._digest

    def begin(self, version: VersionId) -> None:
        """From here on the receiver may hold a mix."""
        self._version, self._digest, self._whole = version, "", False

    def record(self, version: VersionId, digest: str) -> None:
        """It holds all of `version`, read back."""
        self._version, self._digest, self._whole = version, digest, True
