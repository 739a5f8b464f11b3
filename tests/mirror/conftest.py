from __future__ import annotations

import pytest

from ckptsync.store import LocalStore
from tests.mirror.channels import publish_all_kinds


@pytest.fixture(scope="package")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """A channel of every kind of version, to read from."""
    store = LocalStore(str(tmp_path_factory.mktemp("all") / "root"))
    publish_all_kinds(store)
    return store
