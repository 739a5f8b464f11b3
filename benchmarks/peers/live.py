"""From the trainer's weights to another module that computes with them, in one process.

Ours: publish, and a watcher that finds, stages, verifies and loads it and proves what the module then holds. The
nearest that others have: save, and reload into the same module by a call, with nobody to find it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from benchmarks.peers import saving
from benchmarks.peers.clock import OURS, Row
from benchmarks.peers.ways import Place, Way, compare, sync
from benchmarks.peers.weights import model_of, nbytes, step
from watchers.engines.module import ModuleEngine
from watchers.health import Receipt
from watchers.watcher import Watcher

LACKS = "no discovery, no digest, no proof, may serve a mix"
Parts = Mapping[str, float]


def run(model: PreTrainedModel, place: Place, rounds: int) -> list[Row]:
    engine = model_of(nbytes(model) / 1e9)
    with saving.ours(model, place) as publish, Watched(place, engine) as watched:
        own = f"{place.root}/channel/data"
        ways = [Way(OURS, lambda _: watched.after(publish), keeps=own)]
        ways += _remote(model, engine, place) if place.remote else _local(model, engine)
        rows = compare("publish to live", place, nbytes(model) / 1e9, rounds, ways, lambda: step(model))
    place.drop(f"{place.root}/channel")
    return rows


class Watched:
    """A watcher in a thread, which is woken after each publish as a trainer's POST /wake does it."""

    def __init__(self, place: Place, engine: torch.nn.Module) -> None:
        self._receipts: list[Receipt] = []
        self._came, self._stop = threading.Event(), threading.Event()
        self._stage = tempfile.TemporaryDirectory(dir=saving.STAGED, prefix="ckptsync-peers-")
        self._watcher = Watcher(
            f"{place.url}/channel", ModuleEngine(engine), stage=self._stage.name, on_receipt=self._take
        )
        self._thread = threading.Thread(target=self._watcher.run, args=(self._stop,))

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.wake()
        self._thread.join()
        self._watcher.close()
        self._stage.cleanup()

    def after(self, publish: Callable[[], None]) -> Parts:
        self._came.clear()
        publish()
        self._watcher.wake()
        while True:
            self._came.wait()
            self._came.clear()
            if self._receipts[-1].state == "serving":
                return {"pause": self._receipts[-1].pause_seconds}

    def _take(self, receipt: Receipt) -> None:
        self._receipts.append(receipt)
        self._came.set()


def _local(model: PreTrainedModel, engine: torch.nn.Module) -> list[Way]:
    state, live = model.state_dict(), engine.state_dict()

    def plain(out: str) -> Parts:
        path = f"{out}/model.safetensors"
        save_file(state, path)
        sync(out)
        return paused(lambda: engine.load_state_dict(load_file(path)))

    def pickled(out: str) -> Parts:
        torch.save(state, f"{out}/model.pt")
        sync(out)
        return paused(lambda: engine.load_state_dict(torch.load(f"{out}/model.pt", mmap=True)))

    def pretrained(out: str) -> Parts:
        model.save_pretrained(out)
        sync(out)
        return paused(lambda: engine.load_state_dict(type(model).from_pretrained(out, dtype=model.dtype).state_dict()))

    def distributed(out: str) -> Parts:
        dcp.save(dict(state), checkpoint_id=out, no_dist=True)
        return paused(lambda: dcp.load(dict(live), checkpoint_id=out, no_dist=True))

    return [
        Way("save_file + fsync, load_file", plain, LACKS),
        Way("torch.save + fsync, torch.load mapped", pickled, LACKS + ", a pickle"),
        Way("save_pretrained + fsync, from_pretrained", pretrained, LACKS),
        Way("DCP save, load in place", distributed, LACKS + ", a pickle"),
    ]


def _remote(model: PreTrainedModel, engine: torch.nn.Module, place: Place) -> list[Way]:
    state = model.state_dict()

    def plain(out: str) -> Parts:
        with tempfile.TemporaryDirectory(dir=saving.STAGED) as folder:
            path = f"{folder}/model.safetensors"
            save_file(state, path)
            place.fs.put(path, f"{out}/model.safetensors")
            place.fs.get(f"{out}/model.safetensors", path)
            return paused(lambda: engine.load_state_dict(load_file(path)))

    return [Way("save_file, s3fs put and get, load_file", plain, LACKS)]


def paused(load: Callable[[], object]) -> Parts:
    """While its weights change the module cannot compute."""
    start = time.perf_counter()
    load()
    return {"pause": time.perf_counter() - start}
