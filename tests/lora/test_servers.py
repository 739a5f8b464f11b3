"""Adapters published from PEFT, followed by a watcher, served by a real vLLM and a real SGLang."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ckptsync.errors import EngineRefused, EngineUnavailable, NoTransport
from ckptsync.publish import Publisher
from ckptsync.sync import WeightSync
from ckptsync.transports import SglangLora
from tests.engines.conftest import Server, _starter, models
from tests.lora.models import randomise, with_adapter
from tests.sglang_plugin.conftest import remove_queues
from watchers.adapters import AdapterEngine
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine
from watchers.stage import Stage
from watchers.watcher import Watcher

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]

FLAGS = {
    "vllm": ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3", "--max-cpu-loras", "3"],
    "sglang": [
        *("--tp", "2", "--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native"),
        *("--lora-target-modules", "q_proj", "v_proj", "--max-loaded-loras", "3", "--max-loras-per-batch", "3"),
    ],
}
HOSTS: dict[str, Any] = {"vllm": VllmEngine, "sglang": SglangEngine}
PROMPTS = ([1, 2, 3, 4, 5], [200, 100, 50, 25])
TOKENS = 12
SAME, OTHER = 0.05, 0.5
"""Logits."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen3 in float32, so that engines and transformers agree on the largest logit."""
    return models.tiny_model(str(tmp_path_factory.mktemp("base")), 1, dtype="float32")


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started for adapters, SGLang over two ranks. Tests leave it without any."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        stack.callback(remove_queues)
        start = _starter(tmp_path_factory.mktemp(request.param), stack)
        yield start(request.param, base, *FLAGS[request.param])


@pytest.fixture
def host(server: Server) -> Iterator[Any]:
    with closing(HOSTS[server.engine](server.url)) as host:
        yield host
        for name in host.adapters():
            host.unload_adapter(name)


def peft_model(base: str) -> Any:
    import transformers

    return with_adapter(transformers.AutoModelForCausalLM.from_pretrained(base), 1)


@torch.no_grad()
def regret(model: Any, answers: list[list[int]]) -> float:
    """How far the answers are from greedy in transformers with PEFT: the largest gap, in logits, between a served
    token and the best one after the same text. Kernels differ in the last bits, so near ties may fall elsewhere."""
    gaps = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        gaps.append(logits.max(-1).values - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0])
    return float(torch.cat(gaps).max())


def served(server: Server, adapter: str = "") -> list[list[int]]:
    """The server's greedy tokens for a model name."""
    return [_ask(server, prompt, adapter) for prompt in PROMPTS]


def _ask(server: Server, prompt: list[int], adapter: str) -> list[int]:
    path, body = server.request(list(prompt), TOKENS)
    body = dict(body) | ({"model": adapter or "m"} if server.engine == "vllm" else {"lora_path": adapter or None})
    response = httpx.post(server.url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"] if server.engine == "vllm" else answer["output_ids"]


class Down:
    """A replica that is not there any more when an adapter is to be loaded."""

    name = "down"

    def boot_id(self) -> str:
        return "1"

    def adapters(self) -> Mapping[str, str]:
        return {}

    def load_adapter(self, name: str, folder: str) -> None:
        raise EngineUnavailable("no answer")

    def unload_adapter(self, name: str) -> None:
        raise EngineUnavailable("no answer")

    def close(self) -> None:
        pass


def test_adapters_are_published_followed_served_and_unloaded(
    server: Server, host: Any, base: str, tmp_path: Path
) -> None:
    root, model = str(tmp_path / "root"), peft_model(base)
    of_base = served(server)
    engine = AdapterEngine([host], name="policy", staleness=1)
    watcher = Watcher(root, engine, stage=Stage(str(tmp_path / "stage"), keep=3), reader="r")
    answers = []
    with Publisher(root) as publisher, closing(watcher):
        for seed in (1, 2, 3):
            randomise(model, seed)
            publisher.publish(model, kind="adapter", step=seed)
            receipt = watcher.step()
            assert receipt is not None
            assert (receipt.state, receipt.label) == ("serving", f"e1-v{seed}"), receipt.error
            answers.append(served(server, f"policy@e1-v{seed}"))
            regrets = [regret(model, each) for each in (of_base, *answers)]
            assert regrets.pop() < SAME, "served is what was trained"
            assert min(regrets) > OTHER, "no other version would have passed"
        assert served(server) == of_base, "the base model is still what it was"
        assert served(server, "policy@e1-v2") == answers[1], "inside the staleness window"
        assert sorted(host.adapters()) == ["policy@e1-v2", "policy@e1-v3"]

        publisher.publish(with_rank_16(base), kind="adapter")
        receipt = watcher.step()
        assert receipt is not None
        assert (receipt.state, receipt.label, watcher.health.ready) == ("refused", "e1-v3", True)
        assert served(server, "policy@e1-v3") == answers[2]

        randomise(model, 5)
        publisher.publish(model, kind="adapter")
        both = AdapterEngine([host, Down()], name="policy", staleness=1)
        version = watcher.stage.stage(watcher.channel, watcher.channel.latest())
        with pytest.raises(EngineRefused, match=r"policy@e1-v5 was not loaded on every replica: no answer"):
            both.update(version)
        assert sorted(host.adapters()) == ["policy@e1-v2", "policy@e1-v3"], "taken away from the one that had it"
        receipt = watcher.step()
        assert receipt is not None
        assert receipt.label == "e1-v5"
        assert served(server, "policy@e1-v5") != answers[2]
        assert regret(model, served(server, "policy@e1-v5")) < SAME
        assert set(os.listdir(version.folder)) >= {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.parametrize("server", ["sglang"], indirect=True)
def test_remote_lora_by_value_serves_what_was_trained_and_the_one_before_it(
    server: Server, host: Any, base: str, tmp_path: Path
) -> None:
    model, engine = peft_model(base), AdapterEngine([host], name="fast", staleness=1)
    answers = []
    with WeightSync([SglangLora(verify=True)], channel=str(tmp_path / "root"), engines=[engine]) as sync:
        for seed in (11, 12, 13):
            randomise(model, seed)
            done = sync.sync(model, kind="adapter", step=seed)
            assert (done.transport, engine.version()) == ("sglang_lora", done.version)
            answers.append(served(server, f"fast@{done.version}"))
            regrets = [regret(model, each) for each in answers]
            assert regrets.pop() < SAME, "served is what was trained"
            assert all(other > OTHER for other in regrets), "no other version would have passed"
        assert sorted(host.adapters()) == ["fast@e1-v2", "fast@e1-v3"]
        with pytest.raises(NoTransport, match="rank 16 is incompatible"):
            sync.sync(with_rank_16(base), kind="adapter")
        assert str(engine.version()) == "e1-v3"
        assert served(server, "fast@e1-v3") == answers[2]


def with_rank_16(base: str) -> Any:
    """More than the servers were started for."""
    import transformers

    return with_adapter(transformers.AutoModelForCausalLM.from_pretrained(base), 4, r=16)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
