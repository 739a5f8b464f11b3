from __future__ import annotations

import pytest

from ckptsync.channel import Channel
from ckptsync.store import LocalStore, open_store

from .channels import Trainer


@pytest.fixture(autouse=True)
def ten_seconds_later(monkeypatch):
    """Every file looks 10 seconds older than it is: what waits for less is due, what waits for more is not."""
    monkeypatch.setattr("ckptsync.store.clock.MARGIN", -10.0)


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def store(request, tmp_path):
    """The same rules on a folder and on a real S3 server."""
    if request.param == "disk":
        return open_store(str(tmp_path / "root"))
    root = request.getfixturevalue("s3_root")
    return open_store(root.url, options=root.options)


@pytest.fixture
def disk(tmp_path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"))


@pytest.fixture
def trainer(store) -> Trainer:
    return Trainer(Channel.create(store))


@pytest.fixture
def on_disk(disk) -> Trainer:
    return Trainer(Channel.create(disk))
