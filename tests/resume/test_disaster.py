"""A training that is killed twenty times and goes on at other world sizes, against one that never was.

What makes the comparison exact: float64, every rank computes the whole batch, so that the gradients of all ranks are
equal and their mean over 1, 2 or 4 ranks is too (sums of equal numbers and divisions by powers of two do not round),
and Adam works element by element. The batch is drawn from torch's generator, whose state travels in the trainer
state, as do Adam's moments. Compared are the loss of every step ever taken, all bits of it, and the content digest of
the last version.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptsync.channel import Channel
from ckptsync.epochs import claimed
from tests.trainer.ranks_harness import _main, clean_processes, returned, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]

KILLS, WIDTH = 20, 16
ENDLESS = 1 << 30
"""Steps of an attempt that is to be killed: it never gets there, however fast the machine."""

RANKS = (1, 2, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(rank: int, root: str, log: str, steps: int) -> None:
    """Resume where the channel ends, and train to `steps`, publishing after every one."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    from ckptsync import resume
    from ckptsync.publish import Publisher

    model = fully_shard(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)

    def state() -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(model, optimizer), "rng": torch.get_rng_state(), "step": done}

    done = 0
    saved = state()
    point = resume(root, model, trainer_state=saved, allow_empty=True)
    if point is not None:
        set_optimizer_state_dict(model, optimizer, saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        done = saved["step"]
        assert done == point.step
    with Publisher(root, resumed_from=point.version if point else None) as publisher:
        while done < steps:
            optimizer.zero_grad()
            loss = (model(torch.rand(8, WIDTH, dtype=torch.float64)) - 0.5).square().mean()
            loss.backward()
            optimizer.step()
            done += 1
            if rank == 0:
                with open(log, "a") as file:
                    file.write(f"{done} {loss.item().hex()}\n")
            publisher.publish(model, step=done, trainer_state=state())


def start(context: Any, count: int, *args: Any) -> tuple[list[Any], Any]:
    """The ranks of one attempt, without anybody who waits for them; what they share must be held meanwhile."""
    ports, finished = context.SimpleQueue(), context.Event()
    processes = []
    for rank in range(count):
        _, sender = context.Pipe(duplex=False)
        task = (rank, count, 60.0, False, ports, finished, sender, train, args)
        processes.append(context.Process(target=_main, args=task, daemon=True))
        processes[-1].start()
    return processes, (ports, finished)


def lines(log: str) -> int:
    return len(Path(log).read_text().splitlines()) if os.path.exists(log) else 0


def live_until_killed(count: int, root: str, log: str, dice: random.Random) -> None:
    """One attempt: killed while it starts and resumes, or during some step, publish or commit. Kill -9, all ranks."""
    before, started = lines(log), time.monotonic()
    processes, shared = start(clean_processes(), count, root, log, ENDLESS)
    try:
        if dice.random() < 0.3:
            time.sleep(dice.uniform(0.0, 3.0))
            return
        steps = dice.randrange(1, 4)
        while lines(log) < before + steps and time.monotonic() - started < 120:
            time.sleep(0.01)
        assert lines(log) >= before + steps, "the attempt did not train"
        time.sleep(dice.uniform(0.0, 0.3))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        del shared


def curve(log: str) -> list[tuple[int, str]]:
    return [(int(step), loss) for step, loss in (line.split() for line in Path(log).read_text().splitlines())]


def test_case_1_a_run_killed_twenty_times_at_three_world_sizes_equals_one_that_never_was(tmp_path: Path) -> None:
    calm, stormy = str(tmp_path / "calm"), str(tmp_path / "stormy")
    logs = [str(tmp_path / name) for name in ("calm.log", "stormy.log")]
    returned(run_ranks(1, train, stormy, logs[1], 1))  # so that there is something to go back to
    dice = random.Random(20)
    for kill in range(KILLS):
        live_until_killed(RANKS[kill % 3], stormy, logs[1], dice)
    steps = max(step for step, _ in curve(logs[1])) + 3
    returned(run_ranks(2, train, stormy, logs[1], steps))
    returned(run_ranks(1, train, calm, logs[0], steps))

    expected, found = dict(curve(logs[0])), curve(logs[1])
    wrong = [(step, loss, expected[step]) for step, loss in found if loss != expected[step]]
    assert not wrong, f"{len(wrong)} of {len(found)} losses differ, first {wrong[0]}"
    assert {step for step, _ in found} == set(expected) == set(range(1, steps + 1))
    latest = [Channel.open(root).latest() for root in (calm, stormy)]
    assert latest[0].step == latest[1].step == steps
    assert latest[0].content_digest == latest[1].content_digest
    epochs = len(claimed(Channel.open(stormy).store))
    print(f"{KILLS} kills, {epochs} attempts that got as far as claiming an epoch, {len(found)} steps for {steps}")
    assert epochs > KILLS // 2
