"""Every fault of a delta chain, injected at many places, and what a reader then has: the fault matrix, printed.

    python -m benchmarks.delta_faults [--places 24] [--json]

Five versions of a small model: a full one and four deltas, two of them with a skip of 2. A fault is put into a fresh
copy, and a reader with nothing at hand (or the version before, where it says so) asks for the newest. What it gets is
compared with what the trainer held, to the bit. For each place a row ends in one of three ways: the version itself, by
another way or by the next call; an error, and `fsck --repair` makes the newest version that can be read a full one, or
the next trainer publishes one; or wrong bytes, of which there must be none. Exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from ckptsync import Channel, DeltaPolicy, Publisher
from ckptsync.copies import export_version, read_export
from ckptsync.delta import inplace
from ckptsync.errors import CkptSyncError, Unrepairable
from ckptsync.fsck import repair
from ckptsync.layout import SELF_COPY, manifest_path
from ckptsync.manifest import Manifest, delta_path
from ckptsync.shards.tensors import load_tensors
from ckptsync.version import VersionId
from watchers.stage import Stage

State = dict[str, torch.Tensor]
COUNT = 5


@dataclass(slots=True)
class Outcome:
    """One row: how often the fault was put in, and what came of it."""

    fault: str
    injected: int = 0
    exact: int = 0
    refused: int = 0
    repaired: int = 0
    wrong: int = 0
    errors: set[str] = field(default_factory=set)


class Case:
    """A fresh copy of the channel, below a folder of its own, and what every version held."""

    def __init__(self, folder: str, root: str, held: Mapping[VersionId, State]) -> None:
        self.folder, self.root, self.held = folder, os.path.join(folder, "root"), held
        shutil.copytree(root, self.root)
        self.channel = Channel.open(self.root)
        self.last = self.channel.manifest(VersionId(1, COUNT))

    def manifest(self, number: int) -> Manifest:
        return Channel.open(self.root).manifest(VersionId(1, number))

    def delta(self, number: int, base: int = 0) -> str:
        """The path of a delta's file."""
        manifest = self.manifest(number)
        chosen = manifest.deltas[base]
        return f"{self.root}/{manifest.folder}/{delta_path(chosen.id, 'model', chosen.files['model'][0].name)}"

    def shard(self, number: int) -> str:
        """The path of the first shard of a full version."""
        manifest = self.manifest(number)
        return f"{self.root}/{manifest.folder}/{shard(manifest)}"

    def read(self) -> State:
        """The newest version, as a reader stages it."""
        with closing(Stage(os.path.join(self.folder, "stage"))) as stage:
            return staged(stage, self.channel, self.last)


def shard(manifest: Manifest) -> str:
    return next(name for name, _ in manifest.files() if name.endswith(".safetensors"))


def staged(stage: Stage, channel: Channel, manifest: Manifest) -> State:
    found = stage.stage(channel, manifest)
    track = found.manifest.tracks["model"]
    tensors = {name: tensor.clone() for name, tensor in load_tensors(found.folder, track, verify=False)}
    stage.release(found)
    return tensors


def same(found: State, wanted: State) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in wanted
    )


def publish(root: str) -> dict[VersionId, State]:
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{n}.weight": torch.randn(64, 96, generator=generator).to(torch.bfloat16) for n in range(3)}
    held = {}
    with Publisher(root, delta=DeltaPolicy(skip=(2,), max_chain=100)) as publisher:
        for _ in range(COUNT):
            held[publisher.publish(state).version] = {name: tensor.clone() for name, tensor in state.items()}
            for tensor in state.values():
                bits = tensor.view(torch.int16)
                hit = torch.rand(bits.shape, generator=generator) < 0.03
                bits += hit * torch.randint(-3, 4, bits.shape, generator=generator, dtype=torch.int16)
    return held


# -- faults ----------------------------------------------------------------------------------------------------

Put = Callable[[Case, float], None]
"""Puts the fault in, at a place from 0 to 1."""


def flip(path: str, at: float) -> None:
    with open(path, "r+b") as file:
        file.seek(int(at * os.path.getsize(path)))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def cut(path: str, at: float) -> None:
    os.truncate(path, int(at * os.path.getsize(path)))


def rot(case: Case, at: float) -> None:
    """The version before is at hand, and its bytes are no longer what they were."""
    stage = Stage(os.path.join(case.folder, "stage"))
    found = stage.stage(case.channel, case.manifest(COUNT - 1))
    path = os.path.join(found.folder, shard(found.manifest))
    times = os.stat(path)
    flip(path, 0.5 + at / 2)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    stage.close()


def both(case: Case, put: Callable[[str, float], None], at: float) -> None:
    """Into every delta of the newest version."""
    for base in (0, 1):
        put(case.delta(COUNT, base), at)


def replace_bases(case: Case) -> None:
    """A manifest that is whole, and of another version than its name says."""
    other = f"{case.root}/{manifest_path(VersionId(1, 2))}"
    for number in (1, 3, 4):
        shutil.copy(other, f"{case.root}/{manifest_path(VersionId(1, number))}")


def prune(case: Case, *numbers: int) -> None:
    for number in numbers:
        shutil.rmtree(f"{case.root}/{case.manifest(number).folder}")
        os.remove(f"{case.root}/{manifest_path(VersionId(1, number))}")


FAULTS: dict[str, Put] = {
    "a bit of a skip flipped, single steps lead round it": lambda case, at: flip(case.delta(COUNT, base=1), at),
    "a bit of every delta of the newest version flipped": lambda case, at: both(case, flip, at),
    "a bit of the full version flipped": lambda case, at: flip(case.shard(1), at),
    "a skip truncated, single steps lead round it": lambda case, at: cut(case.delta(COUNT, base=1), at),
    "every delta of the newest version truncated": lambda case, at: both(case, cut, at),
    "a skip's file gone, single steps lead round it": lambda case, _: os.remove(case.delta(COUNT, base=1)),
    "a link's manifest gone, a skip leads round it": lambda case, _: prune(case, 4),
    "a chain pruned in the middle": lambda case, _: prune(case, 3, 4),
    "manifests replaced by another version's": lambda case, _: replace_bases(case),
    "the version before at hand, and rotten": rot,
}
ONCE = ("gone", "pruned", "replaced")
"""In the names of faults that have one place only."""


def tried(fault: str, cases: Iterator[Case], places: int) -> Outcome:
    row = Outcome(fault)
    for number in range(1 if any(word in fault for word in ONCE) else places):
        case = next(cases)
        FAULTS[fault](case, number / places)
        row.injected += 1
        judge(row, case)
    return row


def judge(row: Outcome, case: Case) -> None:
    try:
        found = case.read()
    except CkptSyncError as error:
        row.refused += 1
        row.errors.add(error.kind)
        heal(row, case)
        return
    exact = same(found, case.held[case.last.id])
    row.exact += exact
    row.wrong += not exact


def heal(row: Outcome, case: Case) -> None:
    """What an operator does then; or where nothing is left to repair from, the next trainer. Then the newest version is
    one that a trainer published, to the bit."""
    try:
        whole = repair(Channel.open(case.root)) is not None
    except Unrepairable:
        whole = False
    if not whole:
        with Publisher(case.root, delta=DeltaPolicy()) as publisher:
            publisher.publish(case.held[case.last.id])
    channel = Channel.open(case.root)
    with closing(Stage(os.path.join(case.folder, "healed"))) as stage:
        found = staged(stage, channel, channel.latest())
    right = any(same(found, state) for state in case.held.values())
    row.repaired += right
    row.wrong += not right


# -- kills -----------------------------------------------------------------------------------------------------


def killed(work: Callable[[Callable[[], None]], None], point: int) -> bool:
    """Run `work` in a process that dies by SIGKILL at its `point`-th step; whether it came that far."""
    if pid := os.fork():
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    steps = iter(range(1, point))

    def step() -> None:
        if next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        work(step)
    finally:
        os._exit(0)


def stage_killed(cases: Iterator[Case]) -> Outcome:
    row = Outcome("kill -9 while the stage rebuilds it, at every piece")
    while True:
        case = next(cases)

        def work(step: Callable[[], None], case: Case = case) -> None:
            Stage(os.path.join(case.folder, "stage")).stage(case.channel, case.last, lambda _: step())

        if not killed(work, row.injected + 1):
            return row
        row.injected += 1
        judge(row, case)


def in_place_killed(cases: Iterator[Case]) -> Outcome:
    row = Outcome("kill -9 in the middle of every write in place")
    while True:
        case = next(cases)
        folder = os.path.join(case.folder, "out")
        export_version(case.channel, case.manifest(1), folder)

        def work(step: Callable[[], None], case: Case = case, folder: str = folder) -> None:
            pwrite = os.pwrite

            def torn(handle: int, data: bytes, offset: int) -> int:
                pwrite(handle, bytes(data)[: len(data) // 2], offset)
                step()
                return pwrite(handle, data, offset)

            os.pwrite = torn
            inplace.advance(case.channel, folder, case.last)

        if not killed(work, row.injected + 1):
            return row
        row.injected += 1
        exact = not os.path.exists(os.path.join(folder, SELF_COPY)) or same(*exported(case, folder))
        inplace.advance(case.channel, folder, case.last)
        exact &= read_export(folder).id == case.last.id and same(*exported(case, folder))
        row.exact += exact
        row.wrong += not exact


def exported(case: Case, folder: str) -> tuple[State, State]:
    """What a folder holds that says it is a version, and what the trainer held."""
    manifest = read_export(folder)
    return dict(load_tensors(folder, manifest.tracks["model"], verify=False)), case.held[manifest.id]


def two_readers(cases: Iterator[Case]) -> Outcome:
    case, row = next(cases), Outcome("two readers of one stage at once", injected=1)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: case.read(), range(2)))
    exact = all(same(each, case.held[case.last.id]) for each in found)
    row.exact, row.wrong = int(exact), int(not exact)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=24, help="of each fault that has a place in a file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        held = publish(f"{folder}/root")

        def fresh() -> Iterator[Case]:
            while True:
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    yield Case(own, f"{folder}/root", held)

        cases = fresh()
        warm = next(cases)  # compiles the kernels before the forks
        assert same(warm.read(), held[warm.last.id])
        rows = [tried(fault, cases, given.places) for fault in FAULTS]
        rows += [stage_killed(cases), in_place_killed(cases), two_readers(cases)]
        cases.close()
    if given.json:
        print(json.dumps([asdict(row) | {"errors": sorted(row.errors)} for row in rows]))
    else:
        show(rows)
    return int(any(row.wrong or row.exact + row.repaired != row.injected for row in rows))


def show(rows: list[Outcome]) -> None:
    table = Table(title="Faults of a delta chain, and what a reader has then")
    for column in ("fault", "put in", "the version, to the bit", "refused", "repaired, to the bit", "wrong bytes"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for row in rows:
        refused = f"{row.refused} ({', '.join(sorted(row.errors))})" if row.refused else "0"
        table.add_row(row.fault, str(row.injected), str(row.exact), refused, str(row.repaired), str(row.wrong))
    Console(width=150).print(table)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # what is passed over is what this asks for
    raise SystemExit(main())
