"""What the tests of the watcher do again and again."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ckptsync.manifest import Manifest
from ckptsync.testing.engines import weights_of
from watchers.health import Receipt
from watchers.watcher import Watcher

Watch = Callable[..., Watcher]

SHARD = "model-00002-of-00002.safetensors"
"""The second of the two shards of a `TestPublisher` version."""


def weights(root: str, manifest: Manifest) -> str:
    return weights_of(os.path.join(root, manifest.folder))


def receipt_of(root: str, reader: str = "reader-0") -> dict[str, Any]:
    with open(f"{root}/receipts/{reader}.json", encoding="utf-8") as file:
        return dict(json.load(file))


def step(watcher: Watcher) -> Receipt:
    receipt = watcher.step()
    assert receipt is not None
    return receipt


def shard_of(root: str, manifest: Manifest, name: str = SHARD) -> str:
    return os.path.join(root, manifest.folder, name)


def run_until(watcher: Watcher, done: Callable[[], bool], seconds: float = 60.0) -> None:
    stop, deadline = threading.Event(), time.monotonic() + seconds
    thread = threading.Thread(target=watcher.run, args=(stop,))
    thread.start()
    try:
        while not done() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert done()
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def zero_tail(path: str) -> None:
    size = os.path.getsize(path)
    os.truncate(path, size - 60)
    os.truncate(path, size)
