"""Every store of conftest.py is put to the contract that others can put theirs to."""

from __future__ import annotations

from ckptsync.testing.contract import StoreContract


class TestStores(StoreContract):
    """On a disk, in memory, and on S3 by each route."""
