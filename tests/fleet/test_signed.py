from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from ckptsync import Channel, Publisher
from ckptsync.layout import manifest_path
from ckptsync.manifest import seal
from ckptsync.signing import generate
from ckptsync.store.base import put_bytes
from tests.waiting import until
from tests.watcher.publish import SPECS

from .conftest import Replicas, fakes


def test_a_fleet_that_requires_signatures_stays_on_what_is_signed(
    replicas: Callable[..., Replicas], root: str, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"{tmp_path}/key"
    generate(key)
    with Publisher(root, sign_key=key) as publisher:
        signed = publisher.publish({spec.name: torch.ones(spec.shape) for spec in SPECS}).manifest
    fleet = replicas({"require_signature": key + ".pub"}, **fakes("a", "b"))
    until(lambda: fleet.serve("e1-v1"))
    forged, data = seal(msgspec.structs.replace(signed, number=2))
    store = Channel.open(root).store
    put_bytes(store, manifest_path(forged.id), data)
    store.delete("head.json")
    until(lambda: "e1-v2 is incomplete and is passed over" in caplog.text)
    until(lambda: fleet.fleet.health.newest == "e1-v1")
    assert fleet.labels() == {"a": "e1-v1", "b": "e1-v1"}
    assert [receipt.version for receipt in fleet.receipts] == ["e1-v1", "e1-v1"]
