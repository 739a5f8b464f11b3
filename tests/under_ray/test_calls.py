"""One call to many actors."""

from __future__ import annotations

import os
import pickle
import time

import pytest
from ray.exceptions import RayActorError

from ckptsync.errors import EngineRefused, InvalidInput
from watchers.ray import PartialFailure, ask

from .actors import start

pytestmark = pytest.mark.slow


class Worker:
    def __init__(self, behaves: str) -> None:
        self.behaves = behaves

    def work(self) -> str:
        if self.behaves == "refuses":
            raise EngineRefused("not today")
        if self.behaves == "dies":
            os._exit(1)
        if self.behaves == "hangs":
            time.sleep(600)
        return self.behaves


def test_who_answered_who_failed_and_why_and_who_is_late(nodes: list[str]) -> None:
    workers = {name: start(Worker, name) for name in ("is fine", "refuses", "dies", "hangs")}
    ask(workers, "__ray_ready__", deadline=60).all()  # whoever is late below is not still starting
    started = time.monotonic()
    answers = ask(workers, "work", deadline=120, deadlines={"hangs": 1.0})
    assert time.monotonic() - started < 100
    assert answers.answered == {"is fine": "is fine"}
    assert isinstance(answers.failed["refuses"], EngineRefused)
    assert str(answers.failed["refuses"]) == "not today"
    assert isinstance(answers.failed["dies"], RayActorError)
    assert answers.late == {"hangs": 1.0}
    with pytest.raises(PartialFailure, match=r"^3 of 4 actors .*refuses: EngineRefused: not today.*hangs: no answer"):
        answers.all()
    assert pickle.loads(pickle.dumps(PartialFailure(answers))).answers.late == {"hangs": 1.0}


def test_a_deadline_for_nobody_is_refused() -> None:
    with pytest.raises(InvalidInput, match="deadlines: nobody is not among the actors"):
        ask({}, "work", deadline=1, deadlines={"nobody": 1})
