from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptsync.testing import MemoryStore
from ckptsync.testing.contract import StoreContract


class TestMemoryStore(StoreContract):
    """The store that tests are written on is as strict as the ones that versions are published to."""

    @pytest.fixture
    def root(self) -> Callable[[], MemoryStore]:
        store = MemoryStore()
        return lambda: store
