"""Updates through the plugin of a real vLLM, in process: what is served afterwards, and by which path."""

from __future__ import annotations

from typing import Any

import pytest

from ckptsync.engine import StagedVersion
from tests.envs.processor import vllm_packs_linear_layers
from tests.vllm_plugin.conftest import InProcess, Start

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

Versions = dict[str, StagedVersion]


def test_the_first_update_proves_the_plan_and_the_next_uses_it(
    engine: InProcess, versions: Versions, fresh_tokens: Any
) -> None:
    engine.forget_plan()
    first = engine.to(versions["b"])
    assert (first["state"], first["path"], first["proof"]) == ("loaded", "reload", "elements"), first
    assert engine.tokens() == fresh_tokens("b")
    before = engine.parameters()
    second = engine.to(versions["c"])
    assert (second["state"], second["path"], second["proof"]) == ("loaded", "plan", "elements"), second
    assert engine.tokens() == fresh_tokens("c")
    assert engine.label() == versions["c"].label
    assert engine.parameters() == before  # the addresses too
    plan = engine.plan()
    assert plan["copies"] == 2 * 11 + 3
    assert plan["unread"] == []


def test_a_plan_load_equals_the_stock_reload_bit_for_bit(engine: InProcess, versions: Versions, folders: Any) -> None:
    engine.to(versions["b"])
    assert engine.to(versions["a"])["path"] == "plan"
    by_plan = engine.digest(), engine.tokens()
    engine.to(versions["b"])
    engine.reload(folder=folders["a"])
    assert (engine.digest(), engine.tokens()) == by_plan


def test_a_start_without_an_update_leaves_nothing_behind(engine: InProcess, versions: Versions) -> None:
    engine.to(versions["b"])
    before = engine.digest()
    engine.start()
    assert engine.digest() == before
    engine.finish()
    assert engine.to(versions["c"])["state"] == "loaded"


@pytest.mark.skipif(not vllm_packs_linear_layers(), reason="vLLM packs linear layers on processors with AVX-512 alone")
def test_packed_linear_layers_take_the_engines_own_reload_and_say_so(
    start_vllm: Start, folders: Any, versions: Versions
) -> None:
    """oneDNN on this CPU build packs: parameters are empty, and there is nothing to copy into."""
    engine = start_vllm(folders["a"], packed=True)
    assert engine.parameters()["empty"]
    served = {"a": engine.tokens()}
    for name in ("b", "a", "b"):
        outcome = engine.to(versions[name])
        assert (outcome["state"], outcome["path"], outcome["proof"]) == ("loaded", "reload", "none")
        assert engine.tokens() == served.setdefault(name, engine.tokens())
    assert served["a"] != served["b"]
    assert "computes from a packed copy" in outcome["why"]


def test_reload_weights_of_somebody_else_does_not_confuse_the_plan(
    engine: InProcess, versions: Versions, folders: Any, fresh_tokens: Any
) -> None:
    engine.to(versions["b"])
    engine.reload(folder=folders["c"])
    assert engine.to(versions["a"])["path"] == "plan"
    assert engine.tokens() == fresh_tokens("a")
