"""Long runs: half a minute each in the suite, or as long as CKPTSYNC_SOAK_SECONDS says (`make soak`: ten minutes). The
life of a channel, which needs no engine and little of a processor, takes three minutes where `CI` is set."""

from __future__ import annotations

import os

import pytest

from tests.engines.conftest import fresh_server, pytest_runtest_makereport

__all__ = ["fresh_server", "pytest_runtest_makereport"]


@pytest.fixture
def seconds() -> float:
    """How long the run lasts."""
    return float(os.environ.get("CKPTSYNC_SOAK_SECONDS", "30"))


@pytest.fixture
def seconds_of_life() -> float:
    return float(os.environ.get("CKPTSYNC_SOAK_SECONDS", "180" if os.environ.get("CI") else "30"))
