from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptsync.channel import Channel

from .channels import lively


@pytest.fixture(scope="session")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Channel:
    """Made once; tests only read it."""
    torch.manual_seed(0)
    return lively(str(tmp_path_factory.mktemp("lively") / "root"), versions=12)


@pytest.fixture(scope="session")
def root(channel: Channel) -> Path:
    return Path(channel.store.url)
