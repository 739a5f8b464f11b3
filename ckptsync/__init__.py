"""Carries freshly trained weights from a trainer to inference engines through shared storage.

    publisher = ckptsync.Publisher("s3://bucket/run1", dtype=torch.bfloat16)     # on every trainer rank
    publisher.publish(model, step=step)                                          # collective

Names are imported on first use, so that `import ckptsync` brings in neither torch nor a storage library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import publish_base
    from .channel import Channel
    from .config import PublisherConfig
    from .engine import Engine
    from .errors import CkptSyncError
    from .manifest import Manifest
    from .publish import Published, Publisher
    from .resuming import ResumePoint, resume
    from .store import open_store
    from .version import VersionId

__version__ = "0.1.0"

__all__ = [
    "Channel",
    "CkptSyncError",
    "Engine",
    "Manifest",
    "Published",
    "Publisher",
    "PublisherConfig",
    "ResumePoint",
    "VersionId",
    "open_store",
    "publish_base",
    "resume",
]

_HOME = {
    "Channel": "channel",
    "CkptSyncError": "errors",
    "Engine": "engine",
    "Manifest": "manifest",
    "Published": "publish",
    "Publisher": "publish",
    "PublisherConfig": "config",
    "ResumePoint": "resuming",
    "VersionId": "version",
    "open_store": "store",
    "publish_base": "base",
    "resume": "resuming",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ckptsync' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
