"""Adapters over engines that are played. Fixtures, for a test module to import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine

from .fakes import FakeSglang, FakeVllm

URL = "http://engine:8000"


@pytest.fixture
def fake_vllm() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def vllm(fake_vllm: FakeVllm) -> Iterator[VllmEngine]:
    engine = VllmEngine(URL, transport=fake_vllm.transport)
    yield engine
    engine.close()


@pytest.fixture
def fake_sglang() -> FakeSglang:
    return FakeSglang()


@pytest.fixture
def sglang(fake_sglang: FakeSglang) -> Iterator[SglangEngine]:
    engine = SglangEngine(URL, transport=fake_sglang.transport)
    yield engine
    engine.close()
