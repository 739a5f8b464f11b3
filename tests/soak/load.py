"""Clients that never stop asking, and what a server's process tree weighs meanwhile."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.engines.conftest import Server

MiB = 1 << 20


@dataclass
class Load:
    """`clients` threads that ask for completions one after another: `with Load(server) as load`."""

    server: Server
    clients: int = 3
    tokens: int = 24
    answered: int = 0
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask_on, args=(n,)) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)
            assert not thread.is_alive(), "a request never ended"

    @property
    def ended(self) -> int:
        """Requests, well or not."""
        return self.answered + len(self.failures)

    def _ask_on(self, client: int) -> None:
        asked = 0
        # No kept connections: the server may close an idle one just as a request goes out, which is no update's fault.
        with httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0)) as http:
            while not self._stop.is_set():
                asked += 1
                # Of one length: vLLM's CPU kernels are compiled and kept for each shape, which would look like a leak.
                prompt = [(client * 31 + asked * 7 + i) % 250 for i in range(16)]
                problem = self._ask(http, prompt)
                with self._lock:
                    self.answered += not problem
                    if problem:
                        self.failures.append(problem)

    def _ask(self, http: httpx.Client, prompt: list[int]) -> str:
        """What is wrong with the answer; empty if nothing is."""
        path, body = self.server.request(prompt, self.tokens)
        try:
            answer = http.post(self.server.url + path, json=body)
        except httpx.HTTPError as error:
            return repr(error)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text[:300]}"
        count, ended = self._ending(answer.json())
        return "" if (count, ended) == (self.tokens, "length") else f"{count} tokens, ended by {ended}"

    def _ending(self, answer: dict[str, Any]) -> tuple[int, str]:
        if self.server.engine == "vllm":
            choice = answer["choices"][0]
            return len(choice["token_ids"]), choice["finish_reason"]
        return len(answer["output_ids"]), answer["meta_info"]["finish_reason"]["type"]


def resident(pid: int) -> float:
    """MiB that a process and its children have written for themselves. Mapped files do not count, shards of the stage
    and libraries alike: the kernel takes those back, and whether a page of them is one's own depends on who else is
    there (123 MiB of vLLM's libraries were a server's own or not as another vLLM on the machine came and went)."""
    root = psutil.Process(pid)
    return sum(_anonymous(process.pid) for process in [root, *root.children(recursive=True)]) / MiB


def _anonymous(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("Anonymous:"))
    return int(line.split()[1]) * 1024


def slope(values: list[float]) -> float:
    """Of the least squares line through (0, values[0]), (1, values[1]), ..."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((x - middle) ** 2 for x in range(len(values)))
    return sum((x - middle) * (y - mean) for x, y in enumerate(values)) / spread


def occupied(server: Server) -> dict[str, float]:
    """Requests and KV slots in use, as the idle server itself counts them; all 0 when nothing leaks."""
    if server.engine == "vllm":
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        lines = httpx.get(server.url + "/metrics", timeout=30).text.splitlines()
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(names)}
    httpx.post(server.url + "/flush_cache", timeout=60)  # else the prefix cache holds what is done
    load = httpx.get(server.url + "/v1/loads", timeout=30).json()["loads"][0]
    return {name: load[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")}
