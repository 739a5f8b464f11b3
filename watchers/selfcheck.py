"""Does an engine compute the same after a version was loaded a second time?

Reloading the very same weights changes the output of some models on some engines (hybrid models on vLLM,
vllm-project/vllm#48284): digests, labels and checksums all agree, and only what is computed tells.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ckptsync.engine import Generates, Scores
from ckptsync.errors import EngineRefused

from .watcher import Watcher

PROMPT = tuple(range(1, 65))
"""Plain token ids, where the version brings no canary: any model has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one engine answered to one prompt after the first and after the second load."""

    version: str
    content_digest: str
    fingerprint: str
    """The engine's own checksum after the second load; empty where it offers none."""

    tokens: tuple[list[int], list[int]]
    difference: float
    """The largest between log-probabilities of the first load's tokens."""

    atol: float

    @property
    def same(self) -> bool:
        return self.tokens[0] == self.tokens[1] and self.difference <= self.atol

    @property
    def first_other(self) -> int | None:
        """The first position where the tokens differ."""
        pairs = enumerate(zip(*self.tokens, strict=False))
        return next((position for position, (one, two) in pairs if one != two), None)


def selfcheck(watcher: Watcher, version: str, *, count: int = 32, atol: float = 1e-3) -> Verdict:
    """Load the version twice, and compare `count` greedy tokens and their log-probabilities (within `atol`).

    The prompt is that of the version's canary, where it has one. Raises EngineRefused, before anything is loaded, if
    the engine cannot be asked, and what `Watcher.load_version` raises. The engine serves the version afterwards.
    """
    engine = watcher.engine
    if not (isinstance(engine, Scores) and isinstance(engine, Generates)):
        raise EngineRefused(f"{engine.name} cannot be asked for tokens and their log-probabilities")
    manifest = watcher.channel.resolve(version)
    prompt = PROMPT if manifest.canary is msgspec.UNSET else manifest.canary.prompt_ids
    watcher.load_version(manifest.id.label)
    first = engine.generate(prompt, count)
    scored = engine.score([*prompt, *first], len(prompt))
    receipt = watcher.load_version(manifest.id.label)
    second, again = engine.generate(prompt, count), engine.score([*prompt, *first], len(prompt))
    return Verdict(
        version=manifest.id.label,
        content_digest=manifest.content_digest,
        fingerprint=receipt.fingerprint,
        tokens=(first, second),
        difference=max(abs(one - two) for one, two in zip(scored, again, strict=True)),
        atol=atol,
    )
