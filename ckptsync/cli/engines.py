"""Which adapter stands behind `--engine`, and its options. The only import of `watchers` besides `watch` and `load`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine import Engine
from ..errors import InvalidInput

if TYPE_CHECKING:
    from watchers.roster import Roster, Source

Kind = Annotated[
    str,
    typer.Option(
        "--engine",
        help="vllm, sglang, vllm-plugin or sglang-plugin (the engine with ckptsync in it), "
        "or module (the embedded transformers server).",
    ),
]
Url = Annotated[str, typer.Option("--url", help="Where the engine's HTTP server listens, e.g. http://127.0.0.1:8000.")]
Urls = Annotated[
    list[str] | None, typer.Option("--url", help="Where an engine's HTTP server listens; once for each replica.")
]
RouterUrl = Annotated[str, typer.Option("--router", help="An SGLang router: every worker of its GET /workers.")]
EnginesFile = Annotated[str, typer.Option(help="A file with one URL on each line; read anew at every poll.")]
DnsName = Annotated[str, typer.Option("--dns", help="host:port: an engine at each A record, e.g. a headless service.")]
ApiKey = Annotated[str, typer.Option(envvar="CKPTSYNC_ENGINE_API_KEY", help="Sent as a Bearer token.")]
AdminKey = Annotated[str, typer.Option(envvar="CKPTSYNC_ENGINE_ADMIN_KEY", help="SGLang's --admin-api-key.")]
PauseMode = Annotated[
    str,
    typer.Option(help="vllm: keep, wait, abort; sglang: retract, abort, in_place. Empty: the adapter's default."),
]
Cache = Annotated[str, typer.Option(help="flush, or keep what was computed with the old weights.")]
StageFolder = Annotated[str, typer.Option("--stage", help="Local folder for verified versions; shared by a host.")]
Reader = Annotated[str, typer.Option(help="Name in receipts and leases; host and process id without one.")]
Proof = Annotated[
    int,
    typer.Option(
        help="1: the files' digests; 2: and the engine's schema; 3: and the values in the engine; 4: and the canary.",
        min=1,
        max=4,
    ),
]
Trusted = Annotated[
    str,
    typer.Option(help="JSON file: content digest -> checksum of a trusted engine (see selfcheck), for level 3."),
]
AllowCast = Annotated[bool, typer.Option(help="Load although plain float dtypes differ from the engine's.")]

DEFAULT_STAGE = "/dev/shm/ckptsync"  # noqa: S108 - the stage checks that its folder there is our own


def roster(urls: list[str], router: str, engines_file: str, dns: str, api_key: str) -> Roster:
    """The engines of all the sources that were given; InvalidInput if none was."""
    from watchers.roster import Dns, EnginesFile, Given, Roster, Router

    sources: list[Source] = [Given(urls)] if urls else []
    sources += [Router(router, api_key=api_key)] if router else []
    sources += [EnginesFile(engines_file)] if engines_file else []
    sources += [Dns(dns)] if dns else []
    if not sources:
        raise InvalidInput("which engines? Give --url (once for each), --router, --engines-file or --dns")
    return Roster(sources)


def trusted_checksums(path: str) -> dict[str, str]:
    """What `--trusted` names; empty without it. InvalidInput for a file that is none."""
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--trusted {path}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise InvalidInput(f"--trusted {path}: is not a JSON object of content digest -> checksum")
    return found


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
    if kind == "sglang-plugin":
        from watchers.engines.sglang import SglangOptions
        from watchers.engines.sglang_transfer import SglangTransferEngine

        return SglangTransferEngine(url, SglangOptions(**keys, **chosen))  # type: ignore[arg-type]
    if kind == "module":
        from watchers.engines.embedded import EmbeddedEngine

        return EmbeddedEngine(url)
    raise InvalidInput(f"--engine {kind} is not known: vllm, vllm-plugin, sglang, sglang-plugin or module")
