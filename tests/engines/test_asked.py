"""What the HTTP adapters ask of an engine beside a load: does it sleep, what does its model compute, how does it show
what it holds?"""

from __future__ import annotations

import pytest

from ckptsync.errors import EngineRefused, EngineUnavailable
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine
from watchers.engines.vllm_transfer import VllmTransferEngine

from .conftest import staged
from .faked import URL
from .fakes import FakeSglang, FakeVllm

VERSION = staged("/stage/e0001-v00000007", 7)


@pytest.mark.parametrize("kind", [VllmEngine, VllmTransferEngine])
def test_a_sleeping_vllm_is_left_alone_and_is_another_when_it_wakes(
    kind: type[VllmEngine], fake_vllm: FakeVllm
) -> None:
    engine = kind(URL, transport=fake_vllm.transport)
    before = engine.status()
    engine.pause()
    fake_vllm.sleep()
    with pytest.raises(EngineUnavailable, match="sleeps"):
        engine.status()
    with pytest.raises(EngineRefused, match="loaded again after it wakes up"):
        engine.start(VERSION)
    assert not {"POST /collective_rpc", "POST /start_weight_update"} & set(fake_vllm.seen)
    fake_vllm.wake_up()
    after = engine.status()
    assert after.label == before.label
    assert after.boot_id != before.boot_id
    assert kind(URL, transport=fake_vllm.transport).status().boot_id == after.boot_id, "for who was not there too"


def test_scores_are_those_of_the_tokens_asked_for(vllm: VllmEngine, sglang: SglangEngine) -> None:
    for engine in (vllm, sglang):
        assert engine.score([5, 6, 7, 8], 2) == [-2.0, -3.0]
        assert engine.generate([5, 6], 3) == [7, 7, 7]


@pytest.mark.parametrize("body", [[], {}, {"choices": []}, {"choices": [{"prompt_logprobs": [None]}]}])
def test_a_vllm_that_gives_no_scores_is_refused(vllm: VllmEngine, fake_vllm: FakeVllm, body: object) -> None:
    fake_vllm.answers["POST /v1/completions"] = (200, body)
    with pytest.raises(EngineRefused, match="score: POST"):
        vllm.score([5, 6, 7], 1)


OTHERS = {"meta_info": {"input_token_logprobs": [[None, 5], [-1.0, 9], [-2.0, 7]]}}


@pytest.mark.parametrize("body", [[], {}, {"meta_info": {}}, OTHERS])
def test_an_sglang_that_gives_no_scores_of_these_tokens_is_refused(
    sglang: SglangEngine, fake_sglang: FakeSglang, body: object
) -> None:
    fake_sglang.answers["POST /generate"] = (200, body)
    with pytest.raises(EngineRefused, match="score: POST"):
        sglang.score([5, 6, 7], 1)


def test_how_values_can_be_read_back_is_tried_once_per_boot(
    vllm: VllmEngine, fake_vllm: FakeVllm, sglang: SglangEngine, fake_sglang: FakeSglang
) -> None:
    for engine, fake, call in (
        (vllm, fake_vllm, "POST /weight_checker"),
        (sglang, fake_sglang, "POST /weights_checker"),
    ):
        assert [engine.read_back(), engine.read_back()] == ["checksum", "checksum"]
        assert fake.seen.count(call) == 1
        fake.restart()
        fake.answers[call] = (404, {"detail": "Not Found"})
        assert engine.read_back() == "none"
