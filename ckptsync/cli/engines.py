"""Which adapter stands behind `--engine`, and its options. The only import of `watchers` besides `watch` and `load`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..engine import Engine
from ..errors import InvalidInput

Kind = Annotated[
    str,
    typer.Option(
        "--engine",
        help="vllm, vllm-plugin (vLLM with ckptsync in it), sglang, or module (the embedded transformers server).",
    ),
]
Url = Annotated[str, typer.Option("--url", help="Where the engine's HTTP server listens, e.g. http://127.0.0.1:8000.")]
ApiKey = Annotated[str, typer.Option(envvar="CKPTSYNC_ENGINE_API_KEY", help="Sent as a Bearer token.")]
AdminKey = Annotated[str, typer.Option(envvar="CKPTSYNC_ENGINE_ADMIN_KEY", help="SGLang's --admin-api-key.")]
PauseMode = Annotated[
    str,
    typer.Option(help="vllm: keep, wait, abort; sglang: retract, abort, in_place. Empty: the adapter's default."),
]
Cache = Annotated[str, typer.Option(help="flush, or keep what was computed with the old weights.")]
StageFolder = Annotated[str, typer.Option("--stage", help="Local folder for verified versions; shared by a host.")]
Reader = Annotated[str, typer.Option(help="Name in receipts and leases; host and process id without one.")]
AllowCast = Annotated[bool, typer.Option(help="Load although plain float dtypes differ from the engine's.")]

DEFAULT_STAGE = "/dev/shm/ckptsync"  # noqa: S108 - the stage checks that its folder there is our own


def connect(
    kind: str, url: str, api_key: str = "", admin_key: str = "", pause_mode: str = "", cache: str = ""
) -> Engine:
    """The adapter for an engine that is already running. InvalidInput for a kind or an option that does not exist."""
    keys = {"api_key": api_key, "admin_key": admin_key}
    chosen = {name: value for name, value in (("pause_mode", pause_mode), ("cache", cache)) if value}
    if kind == "vllm":
        from watchers.engines.vllm import VllmEngine, VllmOptions

        return VllmEngine(url, VllmOptions(**keys, **chosen))  # type: ignore[arg-type]
    if kind == "vllm-plugin":
        from watchers.engines.vllm import VllmOptions
        from watchers.engines.vllm_transfer import VllmTransferEngine

        return VllmTransferEngine(url, VllmOptions(**keys, **chosen))  # type: ignore[arg-type]
    if kind == "sglang":
        from watchers.engines.sglang import SglangEngine, SglangOptions

        return SglangEngine(url, SglangOptions(**keys, **chosen))  # type: ignore[arg-type]
    if kind == "module":
        from watchers.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(url)
    raise InvalidInput(f"--engine {kind} is not known: vllm, vllm-plugin, sglang or module")
