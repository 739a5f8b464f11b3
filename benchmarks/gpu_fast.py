"""What `gpu_ipc`, `gpu_nccl` and `gpu_colocated` share: a trainer, a real vLLM, syncs, a kill, and files after.

Everything that is found is printed at once, and every wait has a deadline: the table at the end has what there was.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import queue
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks import in_worker
from ckptsync.errors import CkptSyncError
from ckptsync.export.source import CheckpointSource
from ckptsync.sync import WeightSync
from ckptsync.transports.checkpoint import Checkpoint
from watchers.engines.vllm import VllmEngine, VllmOptions
from watchers.watcher import Watcher

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class TooLate(Exception):
    """A deadline passed."""


@dataclass
class Run:
    """One run: its processes, and what it found."""

    args: argparse.Namespace
    backend: str
    found: dict[str, Any] = field(default_factory=dict)
    children: list[subprocess.Popen[Any]] = field(default_factory=list)
    deadline: float = 0.0

    def note(self, **more: Any) -> None:
        self.found |= more
        print(json.dumps(more), flush=True)
        if self.args.json:
            with open(self.args.json, "w", encoding="utf-8") as file:
                json.dump(self.found, file, indent=1)

    def left(self, seconds: float) -> float:
        """So many seconds, or what is left of the whole run."""
        left = min(seconds, self.deadline - time.monotonic())
        if left <= 0:
            raise TooLate("the time for the whole run is used up")
        return left

    def start(self, module: str, *argv: str, device: str, **more: Any) -> subprocess.Popen[Any]:
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        env["PYTHONPATH"] = os.pathsep.join(
            [in_worker.site(os.path.join(self.args.work, "site")), REPO, env.get("PYTHONPATH", "")]
        )
        if not self.args.dry:
            env["CUDA_VISIBLE_DEVICES"] = device
        command = [sys.executable, "-m", module, *argv, *(["--dry"] if self.args.dry else [])]
        child = subprocess.Popen(command, cwd=REPO, env=env, start_new_session=True, **more)
        self.children.append(child)
        return child

    def end(self) -> None:
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(20)


class Trainer:
    """The child that syncs; its events, each awaited with a deadline."""

    def __init__(self, run: Run, url: str) -> None:
        args = run.args
        self.run = run
        argv = ["--backend", run.backend, "--shape", args.shape, "--url", url, "--work", args.work]
        argv += ["--syncs", str(args.syncs), "--bucket", str(args.bucket), "--ranks", str(args.ranks)]
        pipe = subprocess.PIPE
        self.process = run.start(
            "benchmarks.fast_trainer", *argv, device=args.trainer_gpu, stdin=pipe, stdout=pipe, text=True
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def event(self, seconds: float) -> dict[str, Any]:
        while True:
            try:
                line = self._lines.get(timeout=self.run.left(seconds))
            except queue.Empty:
                raise TooLate(f"nothing from the trainer for {seconds:.0f} s") from None
            if line is None:
                raise TooLate(f"the trainer ended with {self.process.wait(10)}")
            if line.startswith("{"):
                return dict(json.loads(line))

    def expect(self, name: str, seconds: float) -> dict[str, Any]:
        found = self.event(seconds)
        if found["event"] != name:
            raise TooLate(f"the trainer said {found} instead of {name}")
        return found

    def go(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


class Engine:
    """The vLLM process."""

    def __init__(self, run: Run, port: int) -> None:
        self.run, self.port, self.url = run, port, f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[Any] | None = None

    def start(self, folder: str, seconds: float) -> float:
        """Seconds until it answers."""
        started = time.monotonic()
        with open(os.path.join(self.run.args.work, "engine.log"), "ab") as log:
            self.process = self.run.start(
                "benchmarks.vllm_front", folder, "--port", str(self.port), "--backend", self.run.backend,
                "--memory", str(self.run.args.memory), "--tp", str(self.run.args.tp),
                device=self.run.args.engine_gpu, stdout=log, stderr=log,
            )  # fmt: skip
        self.wait(lambda: self.get("/health") is not None, seconds, "the engine answers")
        return time.monotonic() - started

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)

    def wait(self, check: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + self.run.left(seconds)
        while not check():
            if self.process is None or self.process.poll() is not None:
                raise TooLate(f"the engine process ended before {what}:\n{self.log_tail()}")
            if time.monotonic() > end:
                raise TooLate(f"not within {seconds:.0f} s: {what}\n{self.log_tail()}")
            time.sleep(0.01)

    def get(self, path: str, seconds: float = 2.0) -> Any:
        try:
            answer = httpx.get(self.url + path, timeout=seconds)
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def tokens(self, seconds: float = 30.0) -> list[int] | None:
        """A greedy answer; None if it does not serve."""
        try:
            answer = httpx.post(self.url + "/generate", json={}, timeout=self.run.left(seconds))
        except httpx.TransportError:
            return None
        return list(answer.json()["tokens"]) if answer.status_code == 200 else None

    def log_tail(self) -> str:
        with open(os.path.join(self.run.args.work, "engine.log"), encoding="utf-8", errors="replace") as log:
            return "".join(log.readlines()[-25:])


def measure(run: Run) -> None:
    args = run.args
    shutil.rmtree(args.work, ignore_errors=True)
    os.makedirs(args.work)
    engine = Engine(run, free_port())
    trainer = Trainer(run, engine.url)
    published = trainer.expect("published", 180)
    folder = folder_of_newest(args.work)
    run.note(bytes=published["bytes"], limits=_facts(trainer.expect("limits", 120)))
    run.note(engine_start=engine.start(folder, 240))
    trainer.go()
    run.note(tokens_before=engine.tokens(90), gpus=engine.get("/gpus"))
    syncs: list[dict[str, Any]] = []
    while (event := trainer.event(90))["event"] != "last":
        if event["event"] == "limits":
            run.note(limits=run.found["limits"] | _facts(event))
        else:
            syncs.append(_facts(event))
            run.note(syncs=syncs)
    run.note(asked=engine.get("/asked"))
    killed(run, trainer, engine)
    recovered(run, engine, folder)


def killed(run: Run, trainer: Trainer, engine: Engine) -> None:
    """In the middle of a bucket that is not the first."""
    while trainer.expect("bucket", 60)["number"] < run.args.kill_at:
        pass
    time.sleep(run.args.kill_after)
    trainer.kill()
    run.found["killed_at"] = time.monotonic()
    paused, label = engine.get("/is_paused"), engine.get("/weight_info")
    run.note(
        paused_after_kill=bool(paused and paused["is_paused"]), label_after_kill=(label or {}).get("weight_version"),
        serves_after_kill=engine.tokens(5) is not None,
    )  # fmt: skip


def recovered(run: Run, engine: Engine, folder: str) -> None:
    """A successor publishes the last files again, since the fast path is gone, and a watcher loads them. An engine that
    hangs in a broadcast, or died, is started again on the files first."""
    since = run.found.pop("killed_at")
    idle = engine.get("/settled", run.left(run.args.hang)) is not None
    run.note(engine_answers_after_kill=idle)
    if not idle:
        engine.stop()
        run.note(engine_restart=engine.start(folder, 240))
    run.note(**_from_files(run, engine, folder))
    tokens = engine.tokens()
    status = engine.get("/weight_info")
    run.note(
        recovery_seconds=time.monotonic() - since, label_recovered=status["weight_version"] if status else None,
        serves_again=tokens is not None, same_tokens_as_before=tokens == run.found["tokens_before"],
    )  # fmt: skip


def _from_files(run: Run, engine: Engine, folder: str) -> dict[str, Any]:
    channel = os.path.join(run.args.work, "channel")
    options = VllmOptions(fingerprint=False, timeout=60.0)
    watcher = Watcher(
        channel, VllmEngine(engine.url, options), stage=os.path.join(run.args.work, "stage"), reader="bench",
        poll=0.2, events=False, yields=run.args.yields,
    )  # fmt: skip
    started = time.monotonic()
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(watcher, stop), daemon=True)
    thread.start()
    wait = run.left(180)
    with WeightSync([Checkpoint(wait=wait)], channel=channel, engines=[VllmEngine(engine.url, options)]) as sync:
        done = sync.sync(CheckpointSource(folder), assets=os.path.join(run.args.work, "assets"))
    stop.set()
    thread.join(20)
    return {"files_seconds": time.monotonic() - started, "files_version": str(done.version),
            "files_confirmed": done.confirmed, "files_behind": dict(done.behind)}  # fmt: skip


def _watch(watcher: Any, stop: threading.Event) -> None:
    try:
        watcher.run(stop)
    except CkptSyncError as error:
        print(f"watcher: {error}", flush=True)


def _facts(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("event", "at")}


def folder_of_newest(work: str) -> str:
    """Where the first version's files are, as a checkpoint that vLLM starts on."""
    found = glob.glob(os.path.join(work, "channel", "**", "model.safetensors.index.json"), recursive=True)
    if not found:
        raise TooLate("the trainer has published nothing")
    return os.path.dirname(sorted(found)[-1])


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def judged(found: dict[str, Any], syncs: int) -> dict[str, bool]:
    done = found.get("syncs", [])
    return {
        f"{syncs} syncs by the fast path": [s["transport"] for s in done] == [f"vllm_{found['backend']}"] * syncs,
        "version equal on both sides after each": bool(done) and all(s["version"] == s["label"] for s in done),
        "every parameter's sum equal after each": bool(done) and all(each["equal"] for each in done),
        "after the kill: paused, no version, serves nothing": bool(
            found.get("paused_after_kill") and not found.get("serves_after_kill")
            and str(found.get("label_after_kill")).startswith("partial")
        ),
        "serves again, from files, the tokens of those files": bool(found.get("same_tokens_as_before")),
    } | colocated(found)  # fmt: skip


def colocated(found: dict[str, Any]) -> dict[str, bool]:
    """What an engine of several ranks has to show."""
    gpus, asked = found.get("gpus") or [], found.get("asked") or []
    if len(gpus) < 2:
        return {}
    return {
        "the ranks are on GPUs of their own": len(set(gpus)) == len(gpus),
        "each bucket had a handle for each of them, by UUID": bool(asked) and all(
            each["gpus"] == sorted(gpus) for each in asked
        ),
        "each bucket was answered by every rank": bool(asked) and all(each["ranks"] == len(gpus) for each in asked),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    gb = found.get("bytes", 0) / 1e9
    rows = [(f"limit: {name} copy", value) for name, value in found.get("limits", {}).items()]
    times = [each["seconds"] for each in found.get("syncs", [])]
    if times:
        rows += [("sync, median", statistics.median(times)), ("sync, best", min(times)), ("sync, worst", max(times))]
    for name in ("engine_start", "engine_restart", "files_seconds", "recovery_seconds"):
        if name in found:
            rows.append((name.replace("_", " "), found[name]))
    lines = [
        f"{found.get('device')}, {gb:.2f} GB bf16, {found['backend']}",
        "",
        "| | seconds | GB/s |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {name} | {value:.4f} | {gb / value:.1f} |" for name, value in rows)])


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Processes end with the block, and what is wrong is told and not raised: there is a table to be printed."""
    try:
        yield
    except (TooLate, CkptSyncError, httpx.HTTPError, OSError) as error:
        run.note(error=f"{type(error).__name__}: {error}")
    finally:
        run.end()
        if not run.args.keep:
            shutil.rmtree(run.args.work, ignore_errors=True)


def main(
    backend: str,
    what: str,
    *,
    syncs: int,
    engine_gpu: str,
    trainer_gpu: str = "0",
    ranks: int = 1,
    tp: int = 1,
    name: str = "",
) -> int:
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--shape", choices=["4b", "tiny"], default="4b")
    parser.add_argument("--work", default=f"/dev/shm/gpu-{name or backend}")
    parser.add_argument("--syncs", type=int, default=syncs)
    parser.add_argument("--bucket", type=int, default=512 << 20)
    parser.add_argument("--memory", type=float, default=0.4, help="vLLM's share of its GPU")
    parser.add_argument("--trainer-gpu", default=trainer_gpu)
    parser.add_argument("--engine-gpu", default=engine_gpu)
    parser.add_argument("--ranks", type=int, default=ranks, help="of the trainer")
    parser.add_argument("--tp", type=int, default=tp, help="ranks of the engine")
    parser.add_argument("--kill-at", type=int, default=4, help="the bucket in which the trainer dies")
    parser.add_argument("--kill-after", type=float, default=0.01, help="seconds into that bucket")
    parser.add_argument("--yields", type=float, default=1.0, help="seconds that a watcher waits for a sender")
    parser.add_argument("--hang", type=float, default=20.0, help="seconds to wait for an engine after the kill")
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds for the whole run")
    parser.add_argument("--dry", action="store_true", help="on CPU: files for GPUs, gloo for NCCL")
    parser.add_argument("--keep", action="store_true", help="leave --work behind")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    run = Run(args, backend, deadline=time.monotonic() + args.deadline)
    run.note(backend=backend, device=device_name())
    with running(run):
        measure(run)
    bars = judged(run.found, args.syncs)
    print(table(run.found), flush=True)
    print("\n".join(f"{'met   ' if met else 'MISSED'} {bar}" for bar, met in bars.items()), flush=True)
    return 0 if all(bars.values()) else 1


def device_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
    except OSError:
        found = []
    return f"{len(found)} x {found[0]}" if found else "cpu"
