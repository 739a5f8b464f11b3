from __future__ import annotations

import pytest

from ckptsync.signing import Signer, Trust, generate
from ckptsync.store import LocalStore
from tests.mirror.channels import Trainer


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """The trainer's key, and another's: their paths."""
    folder = tmp_path_factory.mktemp("keys")
    paths = [str(folder / name) for name in ("trainer", "other")]
    for path in paths:
        generate(path)
    return paths


@pytest.fixture
def key(keys) -> Signer:
    return Signer.load(keys[0])


@pytest.fixture
def trust(keys) -> Trust:
    return Trust.load(keys[0] + ".pub")


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"))


@pytest.fixture
def trainer(store, key) -> Trainer:
    """Has published e1-v1 to e1-v3, signed."""
    trainer = Trainer(store, sign_key=key)
    trainer.publish(1, 2, 3)
    return trainer
