"""A small real inference server: transformers on a CPU (or any torch device), for demos, tests and debugging.

    python -m watchers.engines.embedded_server MODEL_DIR --port 8000

    POST /generate  {"prompt": str} or {"token_ids": [int]}, and "max_new_tokens": int;
                    answers {"token_ids": [int], "text": str, "version": str}
    GET  /status    {"label", "boot_id", "paused"}          GET  /schema        checkpoint name -> spec
    POST /pause     waits for the request under way         POST /resume
    POST /load      {"folder", "label"}: a staged version   GET  /fingerprint   {"label", "fingerprint"}

Decoding is greedy, and one request is computed at a time. A request that comes while the server is paused
waits; its answer is from one version only, and says which. There is no authentication: whoever reaches the
port may load any folder that this process can read, so it binds to the loopback address unless told
otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ckptsync.engine import StagedVersion
from ckptsync.errors import CkptSyncError, Corrupt, EngineRefused
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import decode

from .module import ModuleEngine

MAX_NEW_TOKENS = 4096


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /generate: a text, or its tokens."""

    prompt: str = ""
    token_ids: list[int] = []
    max_new_tokens: int = 32


class Load(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /load: a staged version's folder, and the label to report for it."""

    folder: str
    label: str


class Generated(msgspec.Struct):
    """The answer of /generate. `version` is the label that all of its tokens come from."""

    token_ids: list[int]
    text: str
    version: str


class Model:
    """A causal language model with its tokenizer, if it has one."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        self.module.train(False)
        self.engine = ModuleEngine(self.module, name=f"embedded:{os.path.basename(folder)}")
        self.tokenizer = _tokenizer(folder)
        self.loaded: StagedVersion | None = None

    def generate(self, request: Prompt) -> Generated:
        """Greedy decoding up to an end token or `max_new_tokens`. Waits while the engine is paused."""
        tokens = self._tokens(request)
        count = min(max(request.max_new_tokens, 1), MAX_NEW_TOKENS)
        with self.engine.gate, torch.inference_mode():
            version = self.engine.status().label
            whole = self.module.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=count,
            )
        new = whole[0, tokens.shape[1] :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True) if self.tokenizer is not None else ""
        return Generated(token_ids=new, text=text, version=version)

    def load(self, request: Load) -> None:
        version = _staged(request)
        self.engine.start(version)
        self.loaded = None
        self.engine.update(version)
        self.engine.finish(version)
        self.loaded = version

    def fingerprint(self) -> Any:
        """On base weights there is nothing to compare with, and so no fingerprint."""
        if self.loaded is None:
            return {"label": "", "fingerprint": ""}
        return msgspec.to_builtins(self.engine.confirm(self.loaded))

    def _tokens(self, request: Prompt) -> torch.Tensor:
        if request.token_ids:
            return torch.tensor([request.token_ids], device=self.module.device)
        if self.tokenizer is None or not request.prompt:
            raise EngineRefused("give token_ids, or a prompt if the model has a tokenizer")
        return torch.tensor([self.tokenizer(request.prompt)["input_ids"]], device=self.module.device)


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    if not os.path.exists(os.path.join(folder, "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _staged(request: Load) -> StagedVersion:
    """The folder explains itself; one without a whole manifest of that label is refused."""
    try:
        with open(os.path.join(request.folder, SELF_COPY), "rb") as file:
            manifest = decode(file.read())
    except (OSError, Corrupt) as error:
        raise EngineRefused(f"{request.folder} is not a staged version: {error}") from error
    if manifest.id.label != request.label:
        raise EngineRefused(f"{request.folder} holds {manifest.id.label}, not {request.label}")
    return StagedVersion(manifest=manifest, folder=request.folder)


def application(model: Model) -> Starlette:
    """The routes. Generation has its own single thread: requests that wait for a resume must not keep it
    out."""
    generating = ThreadPoolExecutor(1, thread_name_prefix="generate")

    async def generate(request: Request) -> JSONResponse:
        prompt = msgspec.json.decode(await request.body(), type=Prompt)
        loop = asyncio.get_running_loop()
        return _json(await loop.run_in_executor(generating, model.generate, prompt))

    async def load(request: Request) -> JSONResponse:
        return _json(await asyncio.to_thread(model.load, msgspec.json.decode(await request.body(), type=Load)))

    def control(call: Callable[[], Any]) -> Callable[[Request], Any]:
        async def answer(_: Request) -> JSONResponse:
            return _json(await asyncio.to_thread(call))

        return answer

    engine = model.engine
    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/load", load, methods=["POST"]),
        Route("/pause", control(engine.pause), methods=["POST"]),
        Route("/resume", control(engine.resume), methods=["POST"]),
        Route("/status", control(engine.status)),
        Route("/schema", control(engine.schema)),
        Route("/fingerprint", control(model.fingerprint)),
    ]
    return Starlette(routes=routes, exception_handlers={CkptSyncError: _refused, msgspec.DecodeError: _refused})


def _json(value: object) -> JSONResponse:
    return JSONResponse(msgspec.to_builtins(value))


async def _refused(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, CkptSyncError):
        return JSONResponse({"kind": error.kind, "message": str(error)}, status_code=409)
    return JSONResponse({"kind": EngineRefused.kind, "message": str(error)}, status_code=400)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m watchers.engines.embedded_server")
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options = parser.parse_args(arguments)
    # Bound before the model is read: a port that is taken is told at once, and clients may already queue up.
    with contextlib.closing(socket.create_server((options.host, options.port))) as listener:
        model = Model(options.model)
        config = uvicorn.Config(application(model), log_level="warning", timeout_graceful_shutdown=3)
        print(f"listening on http://{options.host}:{listener.getsockname()[1]}", flush=True)  # noqa: T201
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            model.engine.close()  # a request that waits at the gate would keep the process alive


if __name__ == "__main__":
    main()
