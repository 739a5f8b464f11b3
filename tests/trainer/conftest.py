from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A place for a channel where nothing is yet."""
    return str(tmp_path / "root")
