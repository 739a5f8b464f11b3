"""What the fast transports ask of a real vLLM server, as far as a CPU goes: everything but the memory itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ckptsync.errors import EngineDirty, ProofFailed
from ckptsync.transports.receivers import Layout
from ckptsync.transports.vllm_ipc import VllmIpcReceiver
from ckptsync.transports.vllm_nccl import VllmNcclReceiver
from tests.envs.processor import vllm_packs_linear_layers
from watchers.engines.vllm import VllmEngine

from .conftest import Started, left_serving, load

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.fixture
def engine(started_on_b: Callable[[str], Started], versions: dict) -> Iterator[VllmEngine]:
    server = started_on_b("vllm").server
    with left_serving(VllmEngine(server.url)) as engine:
        load(engine, versions["a"])
        engine.server = server
        yield engine


def test_a_send_that_breaks_off_names_no_version_and_files_repair_what_it_left(
    engine: VllmEngine, versions: dict
) -> None:
    receiver = VllmIpcReceiver(engine)
    of_a = engine.server.tokens()
    assert "was started without VLLM_ALLOW_INSECURE_SERIALIZATION=1" in receiver.why_not()
    assert "was started with the backend 'ipc'" in VllmNcclReceiver(engine).why_not()
    assert receiver.world_size() == 1
    receiver.connect()
    assert engine.status().label == versions["a"].label
    assert receiver.why_no_sums() is None
    sums = receiver.sums(0)
    assert sums == receiver.sums(0)
    of_nothing = list(sums.values()).count("")
    assert (0 < of_nothing < len(sums)) if vllm_packs_linear_layers() else (of_nothing == 0 < len(sums))

    engine.pause()
    receiver.begin("e1-v7")
    assert engine.status().label == "partial e1-v7"
    with pytest.raises(EngineDirty, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        receiver.update(Layout(["w"], ["bfloat16"], [[1]], [2]), [{"GPU-0": ("handle",)}])
    with pytest.raises(EngineDirty):  # the failed update has ended the session
        receiver.finish("e1-v7")
    assert engine.status().label == "partial e1-v7"

    receiver.begin("e1-v8")
    receiver.begin("e1-v8")  # a successor, that finds the session open
    with pytest.raises(ProofFailed):
        engine.confirm(versions["a"])
    load(engine, versions["a"])
    assert engine.status().label == versions["a"].label
    assert engine.server.tokens() == of_a
