"""Carries freshly trained weights from a trainer to inference engines through shared storage.

    publisher = ckptsync.Publisher("s3://bucket/run1", dtype=torch.bfloat16)     # on every trainer rank
    publisher.publish(model, step=step)                                          # collective

Names are imported on first use, so that `import ckptsync` brings in neither torch nor a storage library. The errors,
which need nothing, are all here: `except ckptsync.Fenced`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import *  # noqa: F403

if TYPE_CHECKING:
    from .base import publish_base
    from .channel import Channel
    from .config import PublisherConfig
    from .delta.policy import DeltaPolicy
    from .engine import Engine
    from .manifest import Manifest
    from .mirror import Mirror
    from .publish import Publisher
    from .published import Published
    from .resuming import ResumePoint, resume
    from .retention import Retention
    from .store import open_store
    from .sync import Synced, WeightSync
    from .version import VersionId

__version__ = "0.1.0"

__all__ = [
    "Channel",
    "DeltaPolicy",
    "Engine",
    "Manifest",
    "Mirror",
    "Published",
    "Publisher",
    "PublisherConfig",
    "ResumePoint",
    "Retention",
    "Synced",
    "VersionId",
    "WeightSync",
    "open_store",
    "publish_base",
    "resume",
]
__all__ += errors.__all__

_HOME = {
    "Channel": "channel",
    "DeltaPolicy": "delta.policy",
    "Engine": "engine",
    "Manifest": "manifest",
    "Mirror": "mirror",
    "Published": "published",
    "Publisher": "publish",
    "PublisherConfig": "config",
    "ResumePoint": "resuming",
    "Retention": "retention",
    "Synced": "sync",
    "VersionId": "version",
    "WeightSync": "sync",
    "open_store": "store",
    "publish_base": "base",
    "resume": "resuming",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ckptsync' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
