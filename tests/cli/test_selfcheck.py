"""`ckptsync selfcheck`, and the levels of proof on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from ckptsync.canary import Canary
from ckptsync.cli import engines
from ckptsync.testing.engines import Checksummed, Computing, FakeEngine
from tests.watcher.publish import SCHEMA, TestPublisher

CANARY = Canary(prompt_ids=(1, 2, 3), output_ids=(4, 5), logprobs=(-0.5, -0.5), atol=0.1)


class Answers(Computing):
    """Greedy tokens and log-probabilities; from its second load on moved by `drift` and `slip`."""

    def __init__(self, *, drift: float = 0.0, slip: int = 0) -> None:
        super().__init__(SCHEMA)
        self.drift, self.slip, self.prompts = drift, slip, list[list[int]]()

    def _again(self) -> bool:
        return self.calls.count(f"update {self.label}") > 1

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        self.prompts.append(list(token_ids))
        return [100 + at + (self.slip if self._again() and at > 2 else 0) for at in range(count)]

    def score(self, token_ids: Sequence[int], first: int) -> list[float]:
        return [value - (self.drift if self._again() else 0.0) for value in super().score(token_ids, first)]


@pytest.fixture
def run(ckptsync: Any, root: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command against an engine of this process."""

    def command(name: str, engine: FakeEngine, *more: object) -> Any:
        monkeypatch.setattr(engines, "connect", lambda *_: engine)
        where = ("--engine", "module", "--url", "http://unused", "--stage", str(tmp_path / "stage"))
        return ckptsync(name, root, "latest", *where, *more)

    return command


def test_case_89_an_engine_that_answers_alike_after_a_second_load_passes(run: Any, root: str) -> None:
    TestPublisher(root).publish(canary=CANARY)
    engine = Answers()
    done = run("selfcheck", engine)
    assert done.code == 0, done.err
    assert "e1-v1 loaded twice: the same" in done.out
    assert "all 32 tokens equal" in done.out
    assert engine.calls.count("update e1-v1") == 2
    assert engine.prompts == [[1, 2, 3]] * 2, "the prompt is the canary's"


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (Answers(slip=1), "tokens differ from position 3 on"),
        (Answers(drift=0.25), "all 32 tokens equal, log-probabilities at most 0.250000 apart"),
    ],
)
def test_case_89_an_engine_that_computes_something_else_after_a_second_load_is_exit_code_1(
    run: Any, root: str, engine: Answers, says: str
) -> None:
    TestPublisher(root).publish()
    done = run("selfcheck", engine)
    assert done.code == 1
    assert "not the same" in done.out
    assert says in done.out


def test_the_checksum_that_it_prints_is_what_trusted_takes(run: Any, root: str, tmp_path: Any) -> None:
    TestPublisher(root).publish()
    verdict = run("selfcheck", Answers(), "--json").json
    assert verdict["same"] is True
    path = tmp_path / "trusted.json"
    path.write_text(json.dumps({verdict["content_digest"]: verdict["fingerprint"]}))
    assert run("load", Checksummed(SCHEMA), "--proof", "3", "--trusted", path).code == 0
    refused = run("load", Checksummed(SCHEMA), "--proof", "3")
    assert (refused.code, "proof-unavailable" in refused.err) == (1, True)


def test_an_engine_that_cannot_be_asked_is_refused_before_it_is_touched(run: Any, root: str) -> None:
    TestPublisher(root).publish()
    engine = FakeEngine(SCHEMA)
    done = run("selfcheck", engine)
    assert (done.code, "engine-refused" in done.err) == (1, True)
    assert engine.calls == []


@pytest.mark.parametrize(("level", "code"), [("2", 0), ("4", 1)])
def test_load_replays_the_canary_where_that_is_asked_for(run: Any, root: str, level: str, code: int) -> None:
    TestPublisher(root).publish(canary=CANARY)
    engine = Computing(SCHEMA)
    engine.says["e1-v1"] = -2.0
    done = run("load", engine, "--proof", level)
    assert done.code == code
    assert ("proof-failed" in done.err) is (code == 1)


@pytest.mark.parametrize(
    "more", [("--proof", "0"), ("--proof", "5"), ("--trusted", "/nonexistent"), ("--trusted", __file__)]
)
def test_levels_and_files_that_do_not_exist_are_usage_errors(run: Any, root: str, more: tuple[str, str]) -> None:
    TestPublisher(root).publish()
    engine = FakeEngine(SCHEMA)
    assert run("load", engine, *more).code == 2
    assert engine.calls == []


def test_show_says_that_there_is_a_canary(ckptsync: Any, root: str) -> None:
    TestPublisher(root).publish(canary=CANARY)
    assert "2 tokens after a prompt of 3, within 0.1" in ckptsync("show", root).out
    assert ckptsync("show", root, "--json").json["canary"]["output_ids"] == [4, 5]


def test_a_version_that_no_trusted_key_signed_is_not_loaded_to_check_an_engine(
    run: Any, ckptsync: Any, root: str, tmp_path: Any
) -> None:
    TestPublisher(root).publish()
    key = str(tmp_path / "run1.pem")
    assert ckptsync("keygen", key).code == 0
    engine = Answers()
    done = run("selfcheck", engine, "--require-signature", key + ".pub")
    assert done.code == 1
    assert "none of them is complete" in done.err
    assert engine.calls.count("update e1-v1") == 0
