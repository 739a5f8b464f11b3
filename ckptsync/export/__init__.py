"""From a model to an ordered stream of (name, tensor). Imports torch."""

from __future__ import annotations

from .source import WeightSource, open_source, open_tracks

__all__ = ["WeightSource", "open_source", "open_tracks"]
