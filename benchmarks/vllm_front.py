"""A real vLLM in this process behind the few routes that a sync needs, for machines where its API server does not run.

    python -m benchmarks.vllm_front FOLDER --port P --backend ipc|nccl [--tp N] [--dry]

The engine is vLLM's own, with its own weight transfer; of the API server there is what `watchers.engines.vllm` and the
transports ask for, answered as 0.32 does. The label is kept here, where 0.26 has none, and set by the call that ends
an update, after every worker has ended it. While it is paused nothing is computed.

`--dry` runs where there is no GPU: IPC handles name files, and NCCL is gloo.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks import in_worker

Route = Callable[[dict[str, Any]], tuple[int, Any]]


def alike(ranks: Sequence[dict[str, float]], other: dict[str, float]) -> bool:
    """Whether the engine's ranks together hold what a checkpoint does: norms are whole on each, all else is split. Of
    the tensors that both have, which are nearly all: tied ones are there once."""
    both = ranks[0].keys() & other.keys()
    found = {name: [each[name] for each in ranks] for name in both}
    whole = {name: values if "norm" in name else [sum(values)] for name, values in found.items()}
    close = all(abs(value - other[name]) <= 1e-6 * (1.0 + abs(value)) for name in both for value in whole[name])
    return close and len(both) >= len(other) - 1


class Engine:
    """vLLM, its label, and whether it is paused."""

    def __init__(self, folder: str, args: argparse.Namespace) -> None:
        from vllm import LLM

        memory = {"gpu_memory_utilization": args.memory} if torch.cuda.is_available() else {}
        ranks = {
            "tensor_parallel_size": args.tp,
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
        }
        self.llm: Any = LLM(
            folder, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=8, dtype="bfloat16", enforce_eager=True,
            weight_transfer_config={"backend": args.backend}, **memory, **(ranks if args.tp > 1 else {}),
        )  # fmt: skip
        self.folder, self.backend, self.tp = folder, args.backend, args.tp
        self.label, self.paused = "default", False
        self.asked: list[dict[str, Any]] = []
        self.born, self.lock = time.time(), threading.Lock()

    def rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """One answer for each rank."""
        with self.lock:
            return self.llm.collective_rpc(method, args=args, kwargs=kwargs)

    def update(self, info: dict[str, Any]) -> None:
        handles = info.get("ipc_handles_pickled")
        gpus = sorted(pickle.loads(base64.b64decode(handles))) if handles else []
        answers = self.rpc("update_weights", update_info=info)
        self.asked.append({"gpus": gpus, "ranks": len(answers), "tensors": len(info.get("names", ()))})

    def tokens(self) -> list[int]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        with self.lock:
            found = self.llm.generate([{"prompt_token_ids": [1, 2, 3, 4, 5]}], greedy, use_tqdm=False)
        return list(found[0].outputs[0].token_ids)


def routes(engine: Engine) -> dict[str, Route]:
    import vllm

    def pause(on: bool) -> tuple[int, Any]:
        engine.paused = on
        return 200, {"status": "paused" if on else "resumed"}

    def label(new: str) -> tuple[int, Any]:
        engine.label = new
        return 200, {"success": True, "new_version": new}

    def finish(body: dict[str, Any]) -> tuple[int, Any]:
        engine.rpc("finish_weight_update")
        if body.get("weight_version") is not None:
            engine.label = body["weight_version"]
        return 200, {"message": "Weight update finished"}

    def done(_: Any) -> tuple[int, Any]:
        return 200, {"message": "done"}

    config = {"weight_transfer_config": {"backend": engine.backend}}
    return {
        "GET /version": lambda _: (200, {"version": str(vllm.__version__)}),
        "GET /health": done,
        "GET /weight_info": lambda _: (200, {"weight_version": engine.label}),
        "GET /is_paused": lambda _: (200, {"is_paused": engine.paused}),
        "GET /metrics": lambda _: (200, f"process_start_time_seconds {engine.born}\n"),
        "GET /v1/models": lambda _: (200, {"data": [{"id": "m", "root": engine.folder, "parent": None}]}),
        "GET /get_world_size": lambda _: (200, {"world_size": engine.tp}),
        "GET /server_info": lambda _: (
            200, {"vllm_config": config, "vllm_env": {"VLLM_ALLOW_INSECURE_SERIALIZATION": True}},
        ),
        "GET /settled": lambda _: (200, {"ranks": engine.rpc(in_worker.settled)}),
        "GET /sums": lambda _: (200, engine.rpc(in_worker.sums)),
        "GET /gpus": lambda _: (200, engine.rpc(in_worker.gpu)),
        "GET /asked": lambda _: (200, engine.asked),
        "POST /pause": lambda _: pause(True),
        "POST /resume": lambda _: pause(False),
        "POST /reset_prefix_cache": lambda _: (200, {"success": bool(engine.llm.reset_prefix_cache())}),
        "POST /update_weight_version": lambda body: label(body["new_version"]),
        "POST /collective_rpc": lambda body: (200, {"results": engine.rpc(body["method"], **body.get("kwargs", {}))}),
        "POST /init_weight_transfer_engine": lambda body: done(
            engine.rpc("init_weight_transfer_engine", init_info=body["init_info"])
        ),
        "POST /start_weight_update": lambda _: done(engine.rpc("start_weight_update")),
        "POST /update_weights": lambda body: done(engine.update(body["update_info"])),
        "POST /finish_weight_update": finish,
        "POST /receive": lambda body: done(engine.rpc(in_worker.receive, body["nbytes"], body["times"])),
        "POST /generate": lambda _: (503, "paused") if engine.paused else (200, {"tokens": engine.tokens()}),
    }  # fmt: skip


def serve(engine: Engine, port: int) -> None:
    table = routes(engine)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # One segment for an answer, sent at once: head and body apart cost 40 ms of delayed acknowledgement each.
        wbufsize = -1
        disable_nagle_algorithm = True

        def respond(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            route = table.get(f"{self.command} {urlsplit(self.path).path}")
            try:
                status, content = route(json.loads(data) if data else {}) if route else (404, {"detail": "Not Found"})
            except Exception as error:  # noqa: BLE001 - as a server answers
                traceback.print_exc()
                status, content = 500, {"error": f"{type(error).__name__}: {error}"}
            text = content if isinstance(content, str) else json.dumps(content)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = respond  # noqa: N815 - names that http.server looks for

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM in this process behind the routes of a sync.")
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", choices=["ipc", "nccl"], required=True)
    parser.add_argument("--memory", type=float, default=0.4)
    parser.add_argument("--tp", type=int, default=1, help="ranks of the engine, each a process with a GPU of its own")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    in_worker.arrange()
    if args.dry:
        os.environ[in_worker.DRY] = "1"
    in_worker.set_up()
    serve(Engine(args.folder, args), args.port)


if __name__ == "__main__":
    main()
