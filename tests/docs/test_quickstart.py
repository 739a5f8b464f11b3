"""docs/quickstart.md: its two programs for one's own process, run as they are there but for the folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsync import Publisher
from ckptsync.transports import ModuleCopy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "quickstart.md").read_text()


@pytest.fixture
def program(tmp_path: Path) -> Any:
    """Run the block of that title with these names: what it prints is the test's."""

    def run(title: str, **names: Any) -> None:
        (text,) = re.findall(rf'^```python title="{title}"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE)
        for folder in ("/nfs/run1", "/dev/shm/run1"):
            assert folder in text
            text = text.replace(folder, str(tmp_path / folder.split("/")[1]))
        exec(compile(text, title, "exec"), names)

    return run


def test_a_watcher_keeps_a_module_of_this_process_on_the_channel(program, tmp_path, capsys):
    trained, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    with Publisher(str(tmp_path / "nfs")) as publisher:
        publisher.publish(trained)
    program("watch.py", model=model, inputs=torch.ones(4))
    assert capsys.readouterr().out.endswith(" e1-v1\n")
    assert torch.equal(model.weight, trained.weight)


def test_a_sync_copies_from_module_to_module_and_goes_by_files_where_that_fails(program, monkeypatch, capsys):
    learner, actor = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def train(module: torch.nn.Linear) -> None:
        torch.nn.init.normal_(module.weight)
        if torch.equal(actor.bias, learner.bias):  # it was copied: the next copy breaks off in the middle
            monkeypatch.setattr(ModuleCopy, "send", break_off)

    def break_off(_: ModuleCopy, sending: Any) -> None:
        sending.touch(*sending.engines)
        sending.engines[0].begin()
        raise RuntimeError("planted")

    program("sync.py", learner=learner, actor=actor, train=train, steps=2)
    assert capsys.readouterr().out == "e1-v1 module ('module',)\ne1-v2 checkpoint ('module',)\n"
    assert torch.equal(actor.weight, learner.weight)
