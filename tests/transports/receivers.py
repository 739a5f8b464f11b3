"""What the fast transports speak to in tests: servers that hold weights and keep the protocol, GPUs that are files.

`FileDevices` stands for CUDA IPC: a buffer is a mapped file, a handle names it, and any process can open it. The fake
servers open handles as the engines do, by GPU UUID, and load what they find.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import torch

from ckptsync.shards.tensors import tensor_bytes
from tests.engines.fakes import Answer, FakeEngine, FakeSglang, FakeVllm

DEVICE = 6


def rebuild_cuda_tensor(path: str, nbytes: int, *_: Any) -> torch.Tensor:
    """In place of torch's, of the same name."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


class FileDevices:
    """GPUs of one host, of which this process computes on one."""

    def __init__(self, folder: str, own: str, visible: list[str] | None = None) -> None:
        self.folder, self._own, self._visible = folder, own, visible or [own]
        self.held: dict[int, str] = {}
        self.collected = 0
        self.why: str | None = None

    def why_not(self) -> str | None:
        return self.why

    def own(self) -> str:
        return self._own

    def visible(self) -> list[str]:
        return self._visible

    def buffer(self, gpu: str, nbytes: int) -> torch.Tensor:
        path = os.path.join(self.folder, f"{gpu}-{uuid.uuid4().hex}")
        buffer = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self.held[buffer.data_ptr()] = path
        return buffer

    def reduce(self, buffer: torch.Tensor) -> Any:
        path = self.held[buffer.data_ptr()]
        return rebuild_cuda_tensor, (path, buffer.numel(), None, None, None, None, 0, uuid.uuid4().hex)

    def collect(self) -> None:
        self.collected += 1


class Holding:
    """A server that holds weights, and may hold a mix."""

    gpus: list[str]

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.open = False
        self.updates: list[dict[str, Any]] = []
        self.ended = 0

    def sums(self) -> dict[str, str]:
        """Of what it really holds."""
        held = {name: tensor for name, tensor in self.weights.items() if tensor.numel()}
        return {name: sha256(tensor_bytes(tensor)).hexdigest() for name, tensor in held.items()}


class TransferVllm(FakeVllm, Holding):
    """vLLM with a native backend, one rank for each of `gpus`. Sessions are as strict as in 0.32."""

    def __init__(self, gpus: list[str], backend: str = "ipc", release: str = "0.32.0") -> None:
        FakeVllm.__init__(self)
        Holding.__init__(self)
        self.gpus, self.backend, self.release = gpus, backend, release
        self.insecure = True
        self.packed = False
        self.group: Any = None

    def answer(self, call: str, body: dict[str, Any]) -> Answer:
        known = {
            "GET /version": lambda: (200, {"version": self.release}),
            "GET /get_world_size": lambda: (200, {"world_size": len(self.gpus)}),
            "GET /server_info": self._info,
            "POST /init_weight_transfer_engine": lambda: self._init(body["init_info"]),
            "POST /start_weight_update": self._start,
            "POST /update_weights": lambda: self._load(body["update_info"]),
            "POST /finish_weight_update": lambda: self._finish(body.get("weight_version")),
            "POST /weight_checker": lambda: self._check(body),
        }.get(call)
        return known() if known else FakeVllm.answer(self, call, body)

    def _info(self) -> Answer:
        config = {"weight_transfer_config": {"backend": self.backend}}
        return 200, {"vllm_config": config, "vllm_env": {"VLLM_ALLOW_INSECURE_SERIALIZATION": self.insecure}}

    def _check(self, body: dict[str, Any]) -> Answer:
        if body["action"] != "checksum":
            return 400, {"error": {"message": "action='compare' requires a 'baseline' object"}}
        return 200, {"checksums": {f"tp{at}:{k}": v for at in range(len(self.gpus)) for k, v in self.sums().items()}}

    def _init(self, info: dict[str, Any]) -> Answer:
        if self.backend == "ipc":
            if info.keys() - ({"packed"} if self.release >= "0.27" else set()):
                return 500, "Invalid init_info"
            self.packed = info.get("packed", False)
        return 200, {"message": "Weight transfer initialized"}

    def _start(self) -> Answer:
        if self.open:
            return 500, "start_weight_update called while a weight update is already active."
        self.open = True
        return 200, {"message": "Weight update started"}

    def _load(self, info: dict[str, Any]) -> Answer:
        self.updates.append(info)
        if not self.open:
            return 500, "start_weight_update must be called before update_weights."
        try:
            self.weights |= self._unpacked(info) if self.backend == "ipc" else self.group.received(info)
        except Exception as error:
            self.open = False
            return 500, f"{type(error).__name__}: {error}"
        return 200, {"message": "Weights updated"}

    def _unpacked(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        packed = info["packed"] if self.release < "0.27" else self.packed
        if not packed:
            raise ValueError("only packed transfers here")
        handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
        every = [self._of_rank(gpu, handles, info) for gpu in self.gpus]
        for name, tensor in every[0].items():
            assert all(torch.equal(tensor, other[name]) for other in every)
        return every[0]

    @staticmethod
    def _of_rank(gpu: str, handles: dict[str, Any], info: dict[str, Any]) -> dict[str, torch.Tensor]:
        if gpu not in handles:
            raise ValueError(f"IPC handle not found for GPU UUID {gpu}. Available UUIDs: {list(handles)}")
        whole = rebuild_cuda_tensor(*handles[gpu])[: sum(info["tensor_sizes"])]
        found = {}
        parts = whole.split(info["tensor_sizes"])
        for name, part, dtype, shape in zip(info["names"], parts, info["dtype_names"], info["shapes"], strict=True):
            found[name] = part.view(getattr(torch, dtype)).view(shape).clone()
        return found

    def _finish(self, label: str | None) -> Answer:
        if not self.open:
            return 500, "finish_weight_update called without a matching start_weight_update."
        self.open = False
        self.ended += 1
        if label is not None:
            self.label = label
        return 200, {"message": "Weight update finished"}


class TransferSglang(FakeSglang, Holding):
    """SGLang 0.5.23 with a TP rank for each of `gpus`."""

    def __init__(self, gpus: list[str]) -> None:
        FakeSglang.__init__(self)
        Holding.__init__(self)
        self.gpus = gpus
        self.group: Any = None
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.config: dict[str, Any] = {}

    def answer(self, call: str, body: dict[str, Any]) -> Answer:
        known = {
            "GET /server_info": self._info,
            "GET /v1/models": self._models,
            "POST /load_lora_adapter_from_tensors": lambda: self._load_adapter(body),
            "POST /unload_lora_adapter": lambda: (
                200,
                {"success": self.adapters.pop(body["lora_name"], None) is not None},
            ),
            "POST /weights_checker": lambda: self._check(body),
            "POST /begin_weight_update": lambda: self._session(True),
            "POST /end_weight_update": lambda: self._session(False),
            "POST /init_weights_update_group": lambda: self.group.join(body),
            "POST /update_weights_from_tensor": lambda: self._load(body, self._unpickled),
            "POST /update_weights_from_distributed": lambda: self._load(body, lambda body: self.group.received(body)),
        }.get(call)
        return known() if known else FakeSglang.answer(self, call, body)

    def _info(self) -> Answer:
        return 200, {
            **self.arguments,
            "random_seed": 7,
            "startup_time": {"tokenizer_e2e": self.boot},
            "tp_size": len(self.gpus),
        }

    def _check(self, body: dict[str, Any]) -> Answer:
        skips = body.get("skip_tensor_list", [])
        sums = {name: each[:16] for name, each in self.sums().items() if not any(skip in name for skip in skips)}
        return 200, {"success": True, "per_engine_checksum": "abc", "ranks": [{"checksums": sums}] * len(self.gpus)}

    def _models(self) -> Answer:
        loaded = [{"id": name, "root": "__tensor__", "parent": "m"} for name in self.adapters]
        return 200, {"data": [{"id": "m", "root": "m", "parent": None}, *loaded]}

    def _load_adapter(self, body: dict[str, Any]) -> Answer:
        name, payloads = body["lora_name"], body["serialized_named_tensors"]
        if name in self.adapters or len(payloads) != len(self.gpus):
            return 400, {"success": False, "error_message": f"{name}: loaded already, or not one payload for each rank"}
        every = [self._bucket(ByValue(io.BytesIO(base64.b64decode(data))).load()) for data in payloads]
        assert all(torch.equal(tensor, other[key]) for other in every for key, tensor in every[0].items())
        self.adapters[name], self.config = every[0], body["config_dict"]
        self.updates.append(body)
        return 200, {"success": True, "error_message": ""}

    def _session(self, begin: bool) -> Answer:
        if self.open == begin:
            return 400, {"success": False, "message": "a session is already open" if begin else "no session is open"}
        self.open = begin
        self.ended += not begin
        return 200, {"success": True, "message": "Success"}

    def _load(self, body: dict[str, Any], read: Any) -> Answer:
        self.updates.append(body)
        if not self.open:
            return 400, {"success": False, "message": "must run between begin and end"}
        try:
            self.weights |= read(body)
        except Exception as error:
            return 400, {"success": False, "message": f"{type(error).__name__}: {error}"}
        return 200, {"success": True, "message": "Success"}

    def _unpickled(self, body: dict[str, Any]) -> dict[str, torch.Tensor]:
        assert body["load_format"] == "flattened_bucket"
        found: dict[str, torch.Tensor] = {}
        for gpu, data in zip(self.gpus, body["serialized_named_tensors"], strict=True):
            found |= self._bucket(OnGpu(gpu, io.BytesIO(base64.b64decode(data))).load())
        return found

    @staticmethod
    def _bucket(bucket: dict[str, Any]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for meta in bucket["metadata"]:
            part = bucket["flattened_tensor"][meta.start_idx : meta.end_idx]
            found[meta.name] = part.view(meta.dtype).reshape(meta.shape).clone()
        return found


BY_VALUE = {
    "torch": ("float32", "bfloat16"),
    "torch._utils": ("_rebuild_tensor_v2",),
    "torch.storage": ("_load_from_bytes",),
    "collections": ("OrderedDict",),
    "types": ("SimpleNamespace",),
}


class ByValue(pickle.Unpickler):
    """Opens what SGLang 0.5.23 opens and is no handle: any rank can, on any host, as often as it likes."""

    def find_class(self, module: str, name: str) -> Any:
        assert name in BY_VALUE.get(module, ()), f"{module}.{name}"
        return super().find_class(module, name)


class OnGpu(pickle.Unpickler):
    """Opens handles that carry this GPU's UUID, and refuses others."""

    def __init__(self, gpu: str, data: io.BytesIO) -> None:
        super().__init__(data)
        self.gpu = gpu

    def find_class(self, module: str, name: str) -> Any:
        if name == "rebuild_cuda_tensor":
            return self._rebuild
        assert module.split(".")[0] in ("torch", "types", "builtins"), f"{module}.{name}"
        return super().find_class(module, name)

    def _rebuild(self, *arguments: Any) -> torch.Tensor:
        assert arguments[DEVICE] == self.gpu, f"a handle for {arguments[DEVICE]} on {self.gpu}"
        return rebuild_cuda_tensor(*arguments)


@contextmanager
def served(fake: FakeEngine) -> Iterator[str]:
    """The fake over real HTTP, for trainers in other processes. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        wbufsize = -1

        def _respond(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = f"http://fake{self.path}"
            with lock:
                answer = fake._handle(httpx.Request(self.command, url, content=data))
            self.send_response(answer.status_code)
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = _respond  # noqa: N815 - names that http.server looks for

        def log_message(self, *_: Any) -> None:
            pass

    lock = threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def bodies(fake: FakeEngine, call: str) -> list[dict[str, Any]]:
    """What was posted there, in order."""
    found = [request.content for seen, request in zip(fake.seen, fake.requests, strict=True) if seen == call]
    return [json.loads(content) if content else {} for content in found]
