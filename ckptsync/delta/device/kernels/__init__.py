"""Loops in Triton, which comes with torch for CUDA; elsewhere torch operations do what they do, and are what they are
tested against."""

from .classes import members_before, tile_counts
from .passes import compact, fold, rests, scan
from .sections import TILE, ends_of, write

__all__ = ["TILE", "compact", "ends_of", "fold", "members_before", "rests", "scan", "tile_counts", "write"]
