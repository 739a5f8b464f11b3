"""What changed in one RL step, out and back in: 1 % of bf16 elements, as an Adam step at a small rate leaves it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.delta import synthetic
from benchmarks.peers import slime
from benchmarks.peers.clock import Row, Taken
from benchmarks.peers.elsewhere import Elsewhere
from benchmarks.peers.saving import STAGED
from benchmarks.peers.ways import Place, Way, compare
from ckptsync.channel import Channel
from ckptsync.delta import DeltaPolicy
from ckptsync.publish import Publisher
from watchers.stage import Stage

DENSITY = 0.01
TENSORS = 32
EFFORTS = ("best", "fast")
"""The first is the default, and the base of the ratios."""
FIREWORKS = ("arc_v2", "arc_v3")
SLIME = "slime-style XOR + zstd-1"
State = dict[str, torch.Tensor]


def run(gb: float, place: Place, rounds: int) -> list[Row]:
    old, new = states(gb)
    size = sum(tensor.nbytes for tensor in old.values()) / 1e9
    with ExitStack() as stack:
        guest = stack.enter_context(Elsewhere())
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=STAGED, prefix="ckptsync-peers-"))
        files = [f"{folder}/old.safetensors", f"{folder}/new.safetensors"]
        for state, path in zip((old, new), files, strict=True):
            save_file(state, path)
        channels = [stack.enter_context(Deltas(place, folder, effort, old, new)) for effort in EFFORTS]
        fireworks = [name for name in FIREWORKS if not _cannot(guest, files, folder, name)]
        encode = [
            Way(each.name, each.publish, keeps=f"{place.root}/{each.effort}/data", grows=True) for each in channels
        ]
        encode += [Way(SLIME, _slime(old, new), "no commit; the chain has no full version")]
        encode += [Way(f"Fireworks {name}", _encoding(guest, files, name), _lacks(name)) for name in fireworks]
        rows = compare("delta, publish", place, size, rounds, encode)
        return rows + _applied(place, size, rounds, channels, old, new, guest, files, folder, fireworks)


def _applied(
    place: Place, size: float, rounds: int, channels: list[Deltas], old: State, new: State, guest: Elsewhere,
    files: list[str], folder: str, fireworks: list[str],
) -> list[Row]:  # fmt: skip
    """Each reader has the version before, in memory, and ends with all of the new one there."""
    written = f"{folder}/slime"
    os.makedirs(written)
    slime.publish({name: array.copy() for name, array in slime.arrays(old).items()}, slime.arrays(new), written)
    ways = [Way(each.name, lambda _, each=each: each.stage()) for each in channels]
    local = f"{folder}/local.safetensors"
    ways.append(
        Way(SLIME, lambda _: slime.apply(local, written), "in place: a failure leaves a mix; old state unproven")
    )
    for name in fireworks:
        diff = f"{folder}/{name}"
        guest.ask("fireworks_encode", old=files[0], new=files[1], out=diff, format_=name)
        ways.append(Way(f"Fireworks {name}", _applying(guest, files[0], diff, name), _lacks(name)))

    def ready() -> None:
        shutil.copyfile(files[0], local)
        for each in channels:
            each.forget()

    return compare("delta, apply", place, size, rounds, ways, ready)


class Deltas:
    """A channel whose versions alternate between the two states, each a delta against the one before."""

    def __init__(self, place: Place, folder: str, effort: str, old: State, new: State) -> None:
        self.effort, self.name = effort, f"ckptsync, {effort}"
        self._states, self._root, self._stage = [old, new], f"{place.url}/{effort}", f"{folder}/stage-{effort}"
        self._publisher = Publisher(self._root, delta=DeltaPolicy(effort=effort, skip=()))
        for _ in range(2):  # a full version, and a delta, which compiles the codec
            self.publish("")

    def __enter__(self) -> Deltas:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()

    def publish(self, _: str) -> None:
        self._publisher.publish(self._states[0])
        self._states.reverse()

    def forget(self) -> None:
        """The stage holds the version before the newest, and no more."""
        shutil.rmtree(self._stage, ignore_errors=True)
        channel = Channel.open(self._root)
        before = sorted(channel.committed())[-2]
        cache = Stage(self._stage)
        cache.stage(channel, channel.manifest(before))
        cache.close()

    def stage(self) -> None:
        cache, channel = Stage(self._stage), Channel.open(self._root)
        cache.stage(channel, channel.resolve("latest"))
        cache.close()


def states(gb: float) -> tuple[State, State]:
    count = round(gb * 1e9 / 2 / TENSORS) * TENSORS
    old, new = synthetic(count, DENSITY)
    return _split(old), _split(new)


def _split(values: np.ndarray) -> State:
    parts = np.split(values.view(np.int16), TENSORS)
    return {f"layers.{i}.weight": torch.from_numpy(part).view(torch.bfloat16) for i, part in enumerate(parts)}


def _slime(old: State, new: State) -> Callable[[str], None]:
    held = {name: array.copy() for name, array in slime.arrays(old).items()}
    targets = [slime.arrays(new), slime.arrays(old)]

    def publish(out: str) -> None:
        slime.publish(held, targets[0], out)
        targets.reverse()

    return publish


def _encoding(guest: Elsewhere, files: list[str], name: str) -> Callable[[str], Taken]:
    def call(out: str) -> Taken:
        return guest.ask("fireworks_encode", old=files[0], new=files[1], out=f"{out}/delta", format_=name)

    return call


def _applying(guest: Elsewhere, old: str, diff: str, name: str) -> Callable[[str], Taken]:
    return lambda _: guest.ask("fireworks_apply", old=old, diff=diff, format_=name)


def _cannot(guest: Elsewhere, files: list[str], folder: str, name: str) -> str:
    """Tried on two small tensors."""
    return guest.cannot("fireworks_encode", old=files[0], new=files[0], out=f"{folder}/try", format_=name)


def _lacks(name: str) -> str:
    loads = ", its blobs are pickles" if name == "arc_v3" else ""
    return f"adler32, no fsync, no commit{loads}"
