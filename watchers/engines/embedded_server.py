"""A small real inference server: transformers on a CPU (or any torch device), for demos, tests and debugging.

    python -m watchers.engines.embedded_server MODEL_DIR --port 8000

    POST /generate  {"prompt": str} or {"token_ids": [int]}, "max_new_tokens": int, "temperature": float;
                    answers {"token_ids": [int], "text": str, "version": str, "logprobs": [float]}
    POST /score     {"token_ids": [int], "first": int}; answers [float], log-probabilities of those from `first` on
    GET  /status    {"label", "boot_id", "paused"}          GET  /schema        checkpoint name -> spec
    POST /pause     waits for the request under way         POST /resume
    POST /load      {"folder", "label"}: a staged version   GET  /fingerprint   {"label", "fingerprint"}
    POST /receive/join, /start, /bucket, /finish: weights from a trainer over gloo, see `receiver`

Decoding is greedy unless a temperature is given, and one request is computed at a time. A request that comes while the
server is paused waits; its answer is from one version only, and says which. There is no authentication: whoever reaches
the port may load any folder that this process can read, so it binds to the loopback address unless told otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from ckptsync.engine import StagedVersion
from ckptsync.errors import Corrupt, EngineRefused
from ckptsync.layout import SELF_COPY
from ckptsync.manifest import decode

from .module import ModuleEngine
from .receiver import Receiver
from .receiving import answering, as_json, control, receiver_routes, told

MAX_NEW_TOKENS = 4096


class Prompt(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /generate: a text, or its tokens."""

    prompt: str = ""
    token_ids: list[int] = []
    max_new_tokens: int = 32
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """0 is greedy; else all of the distribution is sampled from."""


class Tokens(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /score."""

    token_ids: list[int]
    first: Annotated[int, msgspec.Meta(ge=1)]


class Load(msgspec.Struct, forbid_unknown_fields=True):
    """The body of /load: a staged version's folder, and the label to report for it."""

    folder: str
    label: str


class Generated(msgspec.Struct):
    """The answer of /generate. `version` is the label that all of its tokens come from."""

    token_ids: list[int]
    text: str
    version: str
    logprobs: list[float]
    """Of each new token, by the model itself: at temperature 1."""


class Model:
    """A causal language model with its tokenizer, if it has one."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        self.module.train(False)
        self.engine = ModuleEngine(self.module, name=f"embedded:{os.path.basename(folder)}")
        self.tokenizer = _tokenizer(folder)
        self.receiver = Receiver(self.engine)
        self.loaded: StagedVersion | None = None

    def generate(self, request: Prompt) -> Generated:
        """Decoding up to an end token or `max_new_tokens`. Waits while the engine is paused."""
        tokens = self._tokens(request)
        count = min(max(request.max_new_tokens, 1), MAX_NEW_TOKENS)
        with self.engine.gate, torch.inference_mode():
            version = self.engine.status().label
            found = self.module.generate(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=count,
                return_dict_in_generate=True,
                output_logits=True,
                **_sampling(request.temperature),
            )
        ids = found.sequences[0, tokens.shape[1] :]
        said = torch.cat(found.logits).float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        new = ids.tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True) if self.tokenizer is not None else ""
        return Generated(token_ids=new, text=text, version=version, logprobs=said.tolist())

    def load(self, request: Load) -> None:
        version = _staged(request)
        with self.receiver.loading(version.manifest.id, version.manifest.content_digest):
            self.engine.start(version)
            self.loaded = None
            self.engine.update(version)
            self.engine.finish(version)
            self.loaded = version

    def fingerprint(self) -> Any:
        """On base weights there is nothing to compare with, and so no fingerprint. Of weights that were sent: their
        content digest, taken anew from the live tensors."""
        if (sent := self.receiver.read_back()) is not None:
            return {"label": sent.label, "fingerprint": sent.digest}
        if self.loaded is None:
            return {"label": "", "fingerprint": ""}
        return msgspec.to_builtins(self.engine.confirm(self.loaded))

    def _tokens(self, request: Prompt) -> torch.Tensor:
        if request.token_ids:
            return torch.tensor([request.token_ids], device=self.module.device)
        if self.tokenizer is None or not request.prompt:
            raise EngineRefused("give token_ids, or a prompt if the model has a tokenizer")
        return torch.tensor([self.tokenizer(request.prompt)["input_ids"]], device=self.module.device)


def _sampling(temperature: float) -> dict[str, Any]:
    """What the checkpoint's own generation config says of it does not count."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


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
        return as_json(await loop.run_in_executor(generating, model.generate, prompt))

    async def score(request: Request) -> JSONResponse:
        tokens = msgspec.json.decode(await request.body(), type=Tokens)
        loop = asyncio.get_running_loop()
        return as_json(await loop.run_in_executor(generating, model.engine.score, tokens.token_ids, tokens.first))

    routes = [
        Route("/generate", generate, methods=["POST"]),
        Route("/score", score, methods=["POST"]),
        Route("/load", told(model.load, Load), methods=["POST"]),
        Route("/schema", control(model.engine.schema)),
        Route("/fingerprint", control(model.fingerprint)),
    ]
    return answering([*routes, *receiver_routes(model.engine, model.receiver)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m watchers.engines.embedded_server")
    parser.add_argument("model", help="a Hugging Face folder, or a PEFT folder whose base model is here")
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
