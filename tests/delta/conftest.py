"""A trainer that publishes deltas, and a stage that reads them."""

from __future__ import annotations

import pytest

from watchers.stage import Stage

from .test_versions import Trainer


@pytest.fixture
def trainer(tmp_path):
    return Trainer(str(tmp_path / "root"))


@pytest.fixture
def stage(tmp_path):
    stage = Stage(str(tmp_path / "stage"), keep=3)
    yield stage
    stage.close()
