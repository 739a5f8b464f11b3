"""What the caller hands over, opened for one version: models by track, LoRA, names and dtype on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .config import PublisherConfig
from .errors import InvalidInput
from .export.lora import Prepared, prepare
from .export.source import Export, Publishable, Walk, open_tracks
from .manifest import Kind
from .ranks import Ranks
from .remap import Naming, rules_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What is in a version, but for its identity; equal on every rank."""

    models: Mapping[str, Publishable]
    kind: Kind = "full"
    adapter: str = "default"
    merge_lora: bool = False

    def prepare(self, config: PublisherConfig) -> Prepared:
        """InvalidInput for what does not go together."""
        return prepare(
            self.models, kind=self.kind, adapter=self.adapter, merge_lora=self.merge_lora, dtype=config.dtype
        )

    def check_walks_again(self) -> None:
        """InvalidInput for an iterator, which can be walked once: a second way to an engine has to start anew."""
        for track, model in self.models.items():
            if isinstance(model, Iterator):
                raise InvalidInput(
                    f"track {track!r} is an iterator, which ends: give a module, a dict or a WeightSource"
                )


def open_walks(lora: Prepared, config: PublisherConfig, ranks: Ranks) -> tuple[list[Walk], Naming]:
    """Collective; see `open_tracks`. An adapter's names are PEFT's, not those that the rules are for."""
    if lora.adapter is not None:
        how = Export(dtype=config.dtype, ties="duplicate", bucket_bytes=config.bucket_bytes, peft_names=True)
    else:
        naming = Naming(rules_of(config.remove, config.remap), config.param_prefix, config.track_prefix)
        how = Export(
            dtype=config.dtype, ties=config.ties, bucket_bytes=config.bucket_bytes, transform=config.transform,
            naming=naming,
        )  # fmt: skip
    return open_tracks(lora.models, ranks, how), how.naming
