"""Engines that are dictionaries, and a transport that breaks where it is told to. For faults only."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ckptsync.engine import EngineStatus
from ckptsync.errors import EngineUnavailable, SchemaMismatch
from ckptsync.transports.base import Sending, SyncEngine

_boots = itertools.count(1)

PHASES = ("probe", "start", "first bucket", "mid", "finish", "label", "lost answer")


@dataclass
class Box:
    """Holds tensors. `mixed` while only some of a version are in; computing then is what must never happen."""

    name: str
    label: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    mixed: bool = False
    paused: bool = False
    deaf: bool = False
    silent_at: tuple[str, ...] = ()
    """Questions that it lets time out."""
    hangs: tuple[str, ...] = ()
    """Questions that it keeps until it `wakes`."""
    wakes: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)
    boot_id: str = field(default_factory=lambda: f"boot-{next(_boots)}")

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    def status(self) -> EngineStatus:
        self._hear("status")
        return EngineStatus(label=self.label, boot_id=self.boot_id, paused=self.paused)

    def pause(self) -> None:
        self._hear("pause")
        self.paused = True

    def falls_silent(self) -> EngineUnavailable:
        """From now on; what the request under way ends with."""
        self.silent_at = ("status", "pause", "resume")
        error = EngineUnavailable(f"{self.name} does not answer")
        error.silent = self.url
        return error

    def resume(self) -> None:
        self._hear("resume")
        assert not self.mixed, f"{self.name} was resumed on a mix"
        self.paused = False

    def close(self) -> None: ...

    def _hear(self, question: str) -> None:
        self.asked.append(question)
        if question in self.hangs:
            self.wakes.wait()
        if self.deaf or question in self.silent_at:
            error = EngineUnavailable(f"{self.name} does not answer")
            error.silent = self.name if question in self.silent_at else ""
            raise error

    def put(self, name: str, tensor: torch.Tensor) -> None:
        assert self.paused, f"{self.name} is written to while it computes"
        self.weights[name], self.mixed = tensor.detach().clone(), True

    def finish(self, label: str) -> None:
        self.label, self.mixed = label, False


@dataclass
class Carrier:
    """Puts tensors into boxes; fails once, at `fault`, at the engine `victim`, with `error`, on the rank `bad`.

    `label`: the data are in, and the label is not set. `lost answer`: all is in, and the answer does not come.
    """

    name: str = "fast"
    fault: str = ""
    victim: str = "b"
    error: Callable[[str], Exception] = RuntimeError
    bad: int = 0
    times: int = 1
    pauses: bool = True
    sent_to: list[list[str]] = field(default_factory=list)
    closed: bool = False

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        return "no such device" if self._strikes("probe") else None

    def send(self, sending: Sending) -> None:
        self.sent_to.append([engine.name for engine in sending.engines])
        sending.enter("start")
        self._break(sending, "start")
        boxes = [engine for engine in sending.engines if isinstance(engine, Box)] if sending.is_sender else []
        sending.enter("bucket")
        for at, bucket in enumerate(sending.delivery.buckets()):
            for box in boxes:
                sending.touch(box)
                for name, tensor in bucket.tensors:
                    box.put(f"{bucket.track}/{name}", tensor)
            self._break(sending, {0: "first bucket", 1: "mid"}.get(at, ""))
        sending.enter("finish")
        for box in boxes:
            if box.name == self.victim:
                self._break(sending, "finish")
            if box.name == self.victim and self._strikes("label"):
                continue
            box.finish(sending.delivery.label)
            if box.name == self.victim:
                self._break(sending, "lost answer")

    def close(self) -> None:
        self.closed = True

    def _strikes(self, fault: str) -> bool:
        if not fault or fault != self.fault or self.times < 1:
            return False
        self.times -= 1
        return True

    def _break(self, sending: Sending, fault: str) -> None:
        if sending.ranks.rank == self.bad and self._strikes(fault):
            raise self.error(f"broke at {fault}")


def mismatch(message: str) -> Exception:
    return SchemaMismatch(message)
