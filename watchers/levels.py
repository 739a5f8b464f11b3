"""The levels of proof: what a version must have passed before an engine is ready with it. Each includes those below.

At level 4 on an engine that cannot do level 3, the canary stands for it, and the receipt says so.

1. Its files' digests, while it is staged. BadShard. There is no level without it.
2. Its tensors are those that the engine needs, before anything is staged. SchemaMismatch. The default.
3. The engine's live values are the version's, before the engine computes again: read back and compared, or a
   checksum that the engine took of them, equal to a trusted one. ProofFailed.
4. The engine computes with them what the trainer did: the version's canary, replayed right after the resume, since a
   paused engine computes nothing. ProofFailed.

What cannot be had at a level that was asked for is ProofUnavailable, before the engine is paused. At every level the
engine's label is read back, and whatever it reports of its weights is compared with what it reported before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from ckptsync.canary import Canary
from ckptsync.engine import Confirmation, Engine, ReadsBack, Scores, StagedVersion
from ckptsync.errors import InvalidInput, ProofFailed, ProofUnavailable
from ckptsync.manifest import Manifest, TensorSpec

from .proof import Fingerprints, check_schema

SCHEMA, VALUES, CANARY = 2, 3, 4
DEFAULT = SCHEMA


def check_level(level: int) -> int:
    """InvalidInput for a level that does not exist."""
    if isinstance(level, bool) or level not in range(1, CANARY + 1):
        raise InvalidInput(
            f"proof={level!r}: levels are 1 (digests), 2 (and schema), 3 (and values in the engine) and "
            "4 (and canary); digests are always taken"
        )
    return level


class Proof:
    """What one watcher demands of its engine.

    `level`: 1 to 4. `trusted`: content digest of a version -> the checksum that an engine of the same kind and
    settings reports for it; `ckptsync selfcheck` on a server that was freshly started on the version prints it.
    `allow_cast`: load although plain float dtypes differ from the engine's.
    """

    def __init__(
        self, level: int = DEFAULT, *, trusted: Mapping[str, str] | None = None, allow_cast: bool = False
    ) -> None:
        self.level, self.trusted, self._allow_cast = check_level(level), dict(trusted or {}), allow_cast
        self._fingerprints = Fingerprints()

    def before(self, manifest: Manifest, schema: Mapping[str, TensorSpec] | None, engine: Engine) -> None:
        """SchemaMismatch or ProofUnavailable, before the version is staged and the engine is touched."""
        if self.level >= SCHEMA:
            check_schema(manifest, schema, allow_cast=self._allow_cast, engine=engine.name)
        if self.level == VALUES:
            self._check_values_can_be_had(manifest, engine)
        if self.level >= CANARY:
            _check_canary_can_be_had(manifest, engine)

    def after_load(self, version: StagedVersion, confirmation: Confirmation) -> Confirmation:
        """ProofFailed unless the paused engine holds the version, as far as was asked for; with a warning where the
        canary has to stand for what the engine cannot show."""
        found, trusted = confirmation.fingerprint, self.trusted.get(version.manifest.content_digest, "")
        if found and trusted and found != trusted:
            raise ProofFailed(
                f"level 3: {version.label} has checksum {found} in the engine, and {trusted} in a trusted one"
            )
        self._fingerprints.check(version, confirmation)
        if self.level < VALUES or confirmation.read_back or (found and trusted):
            return confirmation
        if self.level == VALUES:
            raise ProofFailed(
                f"level 3: {version.label} was loaded, but its values were neither read back nor given a checksum "
                f"({'; '.join(confirmation.warnings) or 'the engine does not say why'})"
            )
        return replace(confirmation, warnings=(*confirmation.warnings, _STANDS_IN))

    def canary(self, version: StagedVersion) -> Canary | None:
        """What has to be replayed before the engine is ready with the version, if anything."""
        found = version.manifest.canary
        return found if self.level >= CANARY and found is not msgspec.UNSET else None

    def after_resume(self, version: StagedVersion, canary: Canary, engine: Engine) -> None:
        """ProofFailed unless the engine, which computes again, gives the canary's log-probabilities."""
        if not isinstance(engine, Scores):
            raise ProofUnavailable(_NO_SCORES.format(engine.name))
        found = engine.score(canary.token_ids, len(canary.prompt_ids))
        if difference := canary.difference(found):
            raise ProofFailed(f"level 4: {engine.name} holds {version.label} and computes something else: {difference}")

    def forget(self) -> None:
        """After a restart the engine may run under other settings, with other checksums."""
        self._fingerprints.forget()

    def _check_values_can_be_had(self, manifest: Manifest, engine: Engine) -> None:
        how = engine.read_back() if isinstance(engine, ReadsBack) else "none"
        if how == "none":
            raise ProofUnavailable(
                f"level 3: {engine.name} offers neither read-back nor a checksum of all its weights: run ckptsync's "
                "plugin in the engine, or ask for proof=2"
            )
        if how == "checksum" and manifest.content_digest not in self.trusted:
            raise ProofUnavailable(
                f"level 3: {engine.name} offers a checksum of its own, and none of {manifest.id} is trusted to compare "
                f"with: pass trusted={{{manifest.content_digest!r}: checksum}}, as `ckptsync selfcheck` prints it, run "
                "ckptsync's plugin in the engine, or ask for proof=2"
            )


_STANDS_IN = "level 3: values were not read back, nor is a checksum of them trusted: the canary stands for it"
_NO_SCORES = "level 4: {} cannot give log-probabilities of a prompt: ask for proof=3 at most"


def _check_canary_can_be_had(manifest: Manifest, engine: Engine) -> None:
    if manifest.canary is msgspec.UNSET:
        raise ProofUnavailable(
            f"level 4: {manifest.id} was published without a canary: publish(..., canary=ckptsync.canary.record(...)), "
            "or ask for proof=3 at most"
        )
    if not isinstance(engine, Scores):
        raise ProofUnavailable(_NO_SCORES.format(engine.name))
