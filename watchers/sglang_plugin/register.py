"""The `sglang.srt.plugins` entry point: SGLang runs it in every process, before its arguments are resolved."""

from __future__ import annotations

from typing import Any

from .announcement import LOADER

RESOLVE = "sglang.srt.server_args.ServerArgs.resolve_once"


def register() -> None:
    """Add our loader to `--custom-weight-loader`. `/server_info` shows it: an adapter sees that the plugin is there,
    and never calls a server where it is not, which would kill that server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import loader  # noqa: F401 - what cannot be imported is to fail now, not in the first update

    HookRegistry.register(RESOLVE, add_loader, HookType.BEFORE)


def add_loader(server_args: Any) -> None:
    """Idempotent: arguments are resolved once, and asked to be more often."""
    named = list(server_args.custom_weight_loader or [])
    if LOADER not in named:
        server_args.custom_weight_loader = [*named, LOADER]
