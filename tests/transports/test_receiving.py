"""Gloo over HTTP into modules of another server: tracks of a composed engine, and an adapter."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
import uvicorn
from torch import nn

from ckptsync.errors import EngineRefused, NoTransport, SchemaMismatch
from ckptsync.sync import WeightSync
from ckptsync.transports import Gloo
from ckptsync.transports.chain import Patience
from ckptsync.transports.targets import Targets
from tests.lora.models import TinyLM, with_adapter
from tests.trainer.models import TinyModel, reference, same
from tests.transports.test_module import PREFIXES, Pair, empty
from tests.waiting import until
from watchers.engines.composed import ComposedEngine
from watchers.engines.embedded import EmbeddedEngine
from watchers.engines.module import ModuleEngine
from watchers.engines.receiving import receiving

Serve = Callable[[Any], EmbeddedEngine]


@contextmanager
def served(engine: Any) -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = uvicorn.Server(uvicorn.Config(receiving(engine), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """The trainer's side of an engine that is served."""
    with ExitStack() as stack:
        yield lambda engine: stack.enter_context(closing(EmbeddedEngine(stack.enter_context(served(engine)))))


@pytest.fixture
def children() -> dict[str, nn.Module]:
    return {"ar": empty(TinyModel(blocks=2)), "diffusion": empty(TinyModel(blocks=1, tied=False))}


def a_sync(root: Any, engine: Any, **options: Any) -> WeightSync:
    more = {"patience": Patience(tries=1), "bucket_bytes": 900, **options}
    return WeightSync([Gloo(seconds=20)], channel=str(root), engines=[engine], **more)


def test_tracks_reach_a_composed_engine_over_http_together(tmp_path, serve, children):
    model, engine = Pair(), ComposedEngine(children)
    far = serve(engine)
    with a_sync(tmp_path, far, track_prefix=PREFIXES, persist_every=1) as sync:
        done = sync.sync(model)
        assert (done.transport, done.confirmed) == ("gloo", (far.name,))
        assert far.version() == engine.version() == done.version
        content = done.file.result().content_digest
    assert far._ask("GET", "/fingerprint") == {"label": "e1-v1", "fingerprint": content}, "both tracks, read back"
    assert not engine.gate.is_shut
    for track, child in children.items():
        same(dict(child.state_dict()), reference(getattr(model, track)))


def test_when_one_track_breaks_off_none_of_them_serves_until_all_of_a_version_is_in(
    tmp_path, serve, children, monkeypatch
):
    engine, copy = ComposedEngine(children), Targets.copy
    far = serve(engine)

    def breaking(self: Targets, track: str, tensors: Iterator[Any]) -> None:
        if track == "diffusion":
            raise RuntimeError("out of memory")
        copy(self, track, tensors)

    with a_sync(tmp_path, far, track_prefix=PREFIXES) as sync:
        sync.sync(Pair())
        monkeypatch.setattr(Targets, "copy", breaking)
        with pytest.raises(NoTransport, match="out of memory"):
            sync.sync(Pair())
        assert (engine.version(), engine.gate.is_shut) == (None, True)
        with pytest.raises(EngineRefused, match="e1-v2 is half received"):
            far.resume()
        monkeypatch.undo()
        done = sync.sync(Pair())
    assert (far.version(), str(done.version), engine.gate.is_shut) == (done.version, "e1-v3", False)


def test_a_prefix_that_is_not_the_engines_is_refused_over_http_with_nothing_touched(tmp_path, serve, children):
    engine = ComposedEngine(children)
    prefixes = {"ar": "ar.", "vision": "diffusion."}
    with (
        a_sync(tmp_path, serve(engine), track_prefix=prefixes) as sync,
        pytest.raises(SchemaMismatch, match="has the tracks ar, diffusion, the version ar, vision"),
    ):
        sync.sync(Pair())
    assert (engine.version(), engine.gate.is_shut) == (None, False)
    assert not any(tensor.any() for child in children.values() for tensor in child.state_dict().values())


def test_an_adapters_tensors_reach_a_sibling_over_http_and_its_base_stays(tmp_path, serve):
    trained, sibling = (with_adapter(TinyLM(), seed, task_type=None) for seed in (1, 2))
    base = {name: tensor.clone() for name, tensor in sibling.state_dict().items() if "lora" not in name}
    far = serve(ModuleEngine(sibling))
    with a_sync(tmp_path, far) as sync:
        done = sync.sync(trained, kind="adapter")
    assert (done.transport, far.version()) == ("gloo", done.version)
    now = sibling.state_dict()
    same({name: now[name] for name in base}, base)
    lora = {name: tensor for name, tensor in trained.state_dict().items() if "lora" in name}
    assert all(torch.equal(now[name], tensor) for name, tensor in lora.items())
